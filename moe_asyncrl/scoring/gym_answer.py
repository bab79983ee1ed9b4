"""The reward `reasoning_gym`: the score that the task's own `score_answer` gives, from 0 to 1.

It runs in the reward's own processes. The answer is what stands in the last `<answer>…</answer>` of the completion (the
library's extraction), and the whole completion, white space at its ends aside, where there is none. An answer that the
task's scorer cannot read and raises on is wrong (0.0); a prompt that does not come from a task fails the score.
"""

from __future__ import annotations

import ast
import functools
import importlib
from typing import Any

from moe_asyncrl.data.sources.gym import library
from moe_asyncrl.scoring.score import ENTRY

create_dataset = library().create_dataset
extract_answer = importlib.import_module("reasoning_gym.utils").extract_answer


class NoTask(ValueError):
    """The prompt has no item of a task: the fault is the recipe's, not the completion's."""


def reward(prompt: str, completion: str, answer: str | None, metadata: dict[str, Any]) -> float:
    """From 0 to 1. Raises NoTask where the metadata has no item of a task."""
    task, item = entry(str(metadata.get(ENTRY, "")))
    found = extract_answer(completion)
    try:
        return float(task.score_answer(completion.strip() if found is None else found, item))
    except Exception:  # some scorers parse without a guard, and raise on what is no answer at all
        return 0.0


@functools.lru_cache(maxsize=64)
def entry(text: str) -> tuple[Any, dict[str, Any]]:
    """(the task, its item) from the text that a source made of them. Raises NoTask."""
    try:
        made = ast.literal_eval(text)
        return create_dataset(made["task"], size=1, seed=0, **made["config"]), made["item"]
    except (ValueError, SyntaxError, KeyError, TypeError) as e:
        raise NoTask(f"the prompt is not an item of a reasoning-gym task ({type(e).__name__})") from None
