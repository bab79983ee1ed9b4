"""The prompts of a recipe's entry (one path, or a list of sources): opened, checked, in the order of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import xxhash

from moe_asyncrl.config.recipe import Source
from moe_asyncrl.config.sources import source_name
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompt import Fields, Prompt
from moe_asyncrl.data.sources.gym import TaskRows, library_version
from moe_asyncrl.data.sources.mixture import MixtureOrder, shares
from moe_asyncrl.data.sources.paths import files_at, open_path, read_whole
from moe_asyncrl.data.sources.rows import Chain, Rows

Use = Literal["train", "eval"]
Check = Callable[[Prompt], None]
CHECKED_ITEMS = 64
"""Items of a task that are looked at before a run, evenly spread: some tasks take a third of a second for one."""


class Order(Protocol):
    """Which prompt each index of the run is."""

    def at(self, index: int) -> tuple[int, int]:
        """(epoch, position)."""
        ...


@dataclasses.dataclass(frozen=True)
class Part:
    """One source, opened."""

    name: str
    """Empty where the recipe names a path alone."""
    rows: Rows
    weight: float = 1.0
    reward: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> Prompt:
        return self.named(self.rows[position])

    def named(self, prompt: Prompt) -> Prompt:
        """The prompt with the source's name and reward."""
        return msgspec.structs.replace(prompt, name=self.name, reward=self.reward) if self.name else prompt

    def close(self) -> None:
        self.rows.close()


class Prompts:
    """All prompts of an entry, by position: its sources laid end to end."""

    def __init__(self, parts: Sequence[Part], limit: int | None = None) -> None:
        """`limit` keeps so many of all, from the start of each source by its weight."""
        self.parts = tuple(parts)
        whole = [len(p) for p in parts]
        self.sizes = whole if limit is None else shares(limit, [p.weight for p in parts], whole)
        self._chain = Chain(self.parts, self.sizes)

    def __len__(self) -> int:
        return len(self._chain)

    def __getitem__(self, position: int) -> Prompt:
        return self._chain[position]

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in range(len(self)))

    def order(self, *, seed: int, shuffle: bool) -> Order:
        """The endless order in which the run takes them: a function of the seed, sizes and weights alone."""
        return MixtureOrder(self.sizes, [p.weight for p in self.parts], seed=seed, shuffle=shuffle)

    def part(self, position: int) -> Part:
        """The source of a position."""
        return self.parts[self._chain.place(position)[0]]

    def close(self) -> None:
        self._chain.close()


def open_prompts(
    entry: str | Sequence[Source],
    *,
    use: Use,
    seed: int,
    limit: int | None = None,
    check: Check | None = None,
    every_row: bool = True,
) -> Prompts:
    """Open the sources of an entry and look at their prompts with `check`, which raises UserError.

    `seed` is the run's; `limit` is of all sources together. JSON lines are read and checked whole in any case; rows of
    tables with `every_row`; of tasks a few items. Raises UserError that names source and row.
    """
    parts: list[Part] = []
    try:
        if isinstance(entry, str):
            parts.append(Part("", open_path(Path(entry), Fields(), limit=limit, check=check)))
        for source in () if isinstance(entry, str) else entry:
            parts.append(_open(source, use=use, seed=seed, limit=limit, check=check))
        prompts = Prompts(parts, limit)
        if check is not None and every_row:
            for part, size in zip(prompts.parts, prompts.sizes, strict=True):
                _look(part, size, check)
    except BaseException:
        for part in parts:
            part.close()
        raise
    return prompts


def _open(source: Source, *, use: Use, seed: int, limit: int | None, check: Check | None) -> Part:
    fields = Fields(
        prompt=source.prompt_field,
        messages=source.messages_field,
        answer=source.answer_field,
        chat=source.chat,
        system=source.system,
        instruction=source.instruction,
    )
    reward = source.reward
    name = source_name(source)
    if source.reasoning_gym is not None:
        rows: Rows = TaskRows(
            source.reasoning_gym, source.config, size=source.size, seed=task_seed(source, use, seed), fields=fields
        )
        return Part(name, rows, source.weight, reward or "reasoning_gym")
    assert source.path is not None

    def named(prompt: Prompt) -> None:
        assert check is not None
        check(msgspec.structs.replace(prompt, name=name, reward=reward))

    rows = open_path(Path(source.path), fields, split=source.split, limit=limit, check=None if check is None else named)
    return Part(name, rows, source.weight, reward)


def _look(part: Part, size: int, check: Check) -> None:
    if read_whole(part.rows):
        return
    if isinstance(part.rows, TaskRows):
        positions: Sequence[int] = sorted({i * size // CHECKED_ITEMS for i in range(CHECKED_ITEMS)}) if size else ()
    else:
        positions = range(size)
    for position in positions:
        check(part[position])


def task_seed(source: Source, use: Use, seed: int) -> int:
    """Seed of a task's items. Tasks add an item's number to it, so seeds of two uses must lie far apart."""
    if source.seed is not None:
        return source.seed
    return xxhash.xxh3_64_intdigest(f"{use};{0 if use == 'eval' else seed}".encode()) % 2**30


def add_to_digest(h: xxhash.xxh3_128, entry: str | Sequence[Source], *, use: Use, seed: int) -> None:
    """Add everything that says which prompt an index is, beside the run's seed and shuffling.

    That is the bytes of the files, and for a list also fields, weights and tasks. Raises UserError if a file cannot be
    read.
    """
    if isinstance(entry, str):
        _add_files(h, Path(entry), None)
        return
    for source in entry:
        same = msgspec.structs.replace(source, path=None, reward=None, name=None)
        h.update(msgspec.json.encode(same))
        if source.path is not None:
            _add_files(h, Path(source.path), source.split)
        else:
            h.update(f"{task_seed(source, use, seed)};{library_version()};".encode())


def _add_files(h: xxhash.xxh3_128, path: Path, split: str | None) -> None:
    for file in files_at(path, split):
        try:
            with file.open("rb") as f:
                while block := f.read(1 << 22):
                    h.update(block)
        except OSError as e:
            raise UserError(f"{file}: cannot be read: {e.strerror}") from None
