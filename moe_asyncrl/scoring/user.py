"""A reward function of the user's own, named `module:function`.

Its signature, sync or async:

    def reward(prompt: str, completion: str, answer: str | None, metadata: dict) -> float | dict[str, float]

`prompt` is the text (for `messages`: their contents, joined by newlines), `completion` the decoded sample without
special tokens, `answer` and `metadata` come from the prompt's line. A dict's `total` is the reward that training
uses, or the sum of its values without a `total`. Raising, returning anything but finite numbers, and taking longer
than `reward.timeout_s` count as failures; they are never a reward of 0. The module is looked for in the recipe's
folder, then in the working directory, then where Python looks anyway. The function runs in processes of its own; each
completion may see another one.
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.scoring.rules import BUILT_IN

PARAMETERS = ("prompt", "completion", "answer", "metadata")


def split_name(name: str) -> tuple[str, str]:
    """(module, function). Raises UserError where the name has another form."""
    module, colon, function = name.partition(":")
    parts = [*module.split("."), function]
    if not colon or not all(part.isidentifier() for part in parts):
        known = ", ".join(f"`{rule}`" for rule in BUILT_IN)
        raise UserError(f"reward.function: {name!r} is no built-in reward ({known}) nor `module:function`")
    return module, function


def load(name: str, search: Sequence[str]) -> tuple[Callable[..., Any], bool, str]:
    """(the function, whether it is async, its version: the digest of its source file).

    `search` goes before `sys.path`, in order. Raises UserError that says what could not be found, imported or called.
    """
    module_name, function_name = split_name(name)
    sys.path[:0] = [folder for folder in search if folder not in sys.path]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is not None and (module_name + ".").startswith(e.name + "."):
            raise UserError(f"reward.function: no module {e.name!r}; looked in {', '.join(search)}") from None
        raise UserError(f"reward.function: importing {module_name!r} failed: {type(e).__name__}: {e}") from None
    except BaseException as e:
        raise UserError(f"reward.function: importing {module_name!r} failed: {type(e).__name__}: {e}") from None
    function = getattr(module, function_name, None)
    if function is None:
        raise UserError(
            f"reward.function: {module_name!r} ({getattr(module, '__file__', '?')}) has no {function_name!r}"
        )
    if not callable(function):
        raise UserError(f"reward.function: {name!r} is not callable")
    try:
        inspect.signature(function).bind(*PARAMETERS)
    except TypeError as e:
        raise UserError(f"reward.function: {name!r} must take ({', '.join(PARAMETERS)}): {e}") from None
    except ValueError:  # a builtin without a signature: it will be seen when it is called
        pass
    return function, _is_async(function), f"{name}@{_digest(getattr(module, '__file__', None))}"


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _digest(file: str | None) -> str:
    if file is None or not pathlib.Path(file).is_file():
        return "unknown"
    return xxhash.xxh3_64(pathlib.Path(file).read_bytes()).hexdigest()
