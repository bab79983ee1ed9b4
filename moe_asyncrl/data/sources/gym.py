"""A reasoning-gym task as a source: items are made when they are asked for, from the seed and their number.

A few tasks (`word_ladder`, `ransom_note`, `isomorphic_strings`, `knight_swap`, `polynomial_multiplication`) draw from
Python's sets, so that their items are the same in two processes only where PYTHONHASHSEED is set. So an item travels
to its scorer whole, as text of Python literals.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
import warnings
from collections.abc import Mapping
from typing import Any

from moe_asyncrl.data.errors import UserError, first_line
from moe_asyncrl.data.prompt import Fields, Prompt, prompt_from


class TaskRows:
    """The items of one task."""

    def __init__(self, task: str, config: Mapping[str, Any], *, size: int, seed: int, fields: Fields) -> None:
        """`fields` puts text around the questions. Imports reasoning_gym: seconds.

        Raises UserError: an unknown task (with the nearest one), a setting that it does not have or does not take.
        """
        self.task, self._config, self._size = task, dict(config), size
        self._items = make_task(task, config, size=size, seed=seed)
        self._fields = dataclasses.replace(fields, prompt="question", messages=None, answer=None)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int) -> Prompt:
        if not 0 <= position < self._size:
            raise IndexError(f"{self.task}[{position}] of {self._size}")
        source = f"{self.task}[{position}]"
        try:
            item = self._items[position]
        except Exception as e:  # a task is a program of its author
            raise UserError(f"{source}: the task cannot make this item: {first_line(e)}") from None
        prompt = prompt_from({"question": item["question"], "answer": _text(item["answer"])}, source, self._fields)
        entry = repr(literal({"task": self.task, "config": self._config, "item": item}))
        return Prompt(
            source=source,
            prompt=prompt.prompt,
            messages=prompt.messages,
            answer=prompt.answer,
            metadata={"task": self.task},
            entry=entry,
        )

    def close(self) -> None:
        """Nothing is open."""


def make_task(task: str, config: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """The library's data set of that name. Raises UserError as `TaskRows` does."""
    try:
        factory = library()
    except ImportError as e:
        raise UserError(f"reasoning_gym {task!r}: this needs the package `reasoning-gym`: {first_line(e)}") from None
    known = factory.DATASETS
    if task not in known:
        near = difflib.get_close_matches(task, known, n=1, cutoff=0.0)
        raise UserError(f"reasoning_gym: no task {task!r}; did you mean {near[0]!r}? ({len(known)} are known)")
    settings = [f.name for f in dataclasses.fields(known[task][1]) if f.name not in ("size", "seed")]
    for name in config:
        if name not in settings:
            near = difflib.get_close_matches(str(name), settings, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(settings) or 'none'}"
            raise UserError(f"reasoning_gym {task!r}: no setting {name!r}; {advice}")
    try:
        return factory.create_dataset(task, size=size, seed=seed, **config)
    except Exception as e:  # each task checks its settings in its own way
        raise UserError(f"reasoning_gym {task!r}: {first_line(e)}") from None


def library() -> Any:
    """`reasoning_gym.factory`, with every task registered. Seconds. Raises ImportError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports, each time that is compiled
        importlib.import_module("reasoning_gym")
    return importlib.import_module("reasoning_gym.factory")


def library_version() -> str:
    """Version of reasoning-gym: other versions may make other items of the same seed."""
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def literal(value: Any) -> Any:
    """The value made of Python's own literals alone: numpy's scalars and arrays become numbers, texts and lists."""
    if isinstance(value, Mapping):
        return {literal(k): literal(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        kind = set if isinstance(value, frozenset) else list if isinstance(value, list) else type(value)
        if kind is not list and kind is not set:
            return tuple(literal(v) for v in value)
        return kind(literal(v) for v in value)
    if hasattr(value, "tolist"):
        return literal(value.tolist())
    return value if isinstance(value, str | int | float | complex | bool | bytes | None) else str(value)


def _text(answer: object) -> str | None:
    return None if answer is None else str(answer)
