"""The rewards of a recipe: built-in rules and users' functions, with the account of what could not be scored."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Sequence

from moe_asyncrl.config.recipe import Reward
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompt import Prompt
from moe_asyncrl.scoring.pool import RewardPool
from moe_asyncrl.scoring.rules import LIBRARY, MODULES, RULES, last_number
from moe_asyncrl.scoring.score import TOTAL, Score, ScoreJob
from moe_asyncrl.scoring.user import split_name

RULES_VERSION = "1"


def check_prompt(reward: Reward, prompt: Prompt) -> None:
    """Raise UserError, naming file and line, if the rule could not score any completion of this prompt."""
    function = prompt.reward or reward.function
    if function == "reasoning_gym" and prompt.entry is None:
        raise UserError(f"{prompt.source}: the reward 'reasoning_gym' scores items of reasoning-gym tasks only")
    if function not in (*RULES, "math"):
        return
    if prompt.answer is None:
        raise UserError(f"{prompt.source}: `answer` is missing; the reward {function!r} needs it")
    if function == "numeric" and last_number(prompt.answer) is None:
        raise UserError(f"{prompt.source}: `answer` {prompt.answer!r} has no number; the reward 'numeric' needs one")
    if function == "math" and not prompt.answer.strip():
        raise UserError(f"{prompt.source}: `answer` is empty; the reward 'math' needs one")


def search_folders(reward: Reward) -> tuple[str, ...]:
    """Where a user's module is looked for first: the recipe's folder, then the working directory."""
    return (*(() if reward.folder is None else (reward.folder,)), os.getcwd())


class _One:
    """One reward function. Rules of ours run inline: they are linear in the text and cannot hang."""

    def __init__(self, function: str, limit: int, pool: RewardPool | None) -> None:
        self._function, self._limit, self._pool = function, limit, pool
        if pool is None:
            self.version = f"{function}@{RULES_VERSION}"
        elif function in LIBRARY:
            self.version = f"{function}@{importlib.metadata.version(LIBRARY[function])}"
        else:
            self.version = pool.version
        self.failures_in_a_row = 0

    @classmethod
    async def start(cls, function: str, reward: Reward, search: Sequence[str]) -> _One:
        if function in RULES:
            return cls(function, reward.max_consecutive_failures, None)
        if function not in MODULES:
            split_name(function)
        pool = await RewardPool.start(
            MODULES.get(function, function), search=search, workers=reward.workers, timeout_s=reward.timeout_s
        )
        return cls(function, reward.max_consecutive_failures, pool)

    async def score(self, jobs: Sequence[ScoreJob]) -> list[Score]:
        if self._pool is not None:
            scores = await self._pool.score(jobs)
        else:
            rule = RULES[self._function]
            scores = [Score("ok", {TOTAL: rule(j.completion, j.answer or "")}) for j in jobs]
        for score in scores:
            self._count(score)
        return scores

    def _count(self, score: Score) -> None:
        if score.status == "ok":
            self.failures_in_a_row = 0
            return
        self.failures_in_a_row += 1
        if self.failures_in_a_row >= self._limit:
            raise UserError(
                f"reward {self._function!r}: {self.failures_in_a_row} completions in a row could not be scored"
                f" (reward.max_consecutive_failures); the last one: {score.detail}"
            )

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()


class Scorer:
    """Scores completions, each by the recipe's reward or by the one that its prompt's source names."""

    def __init__(self, default: str, functions: dict[str, _One]) -> None:
        self._default, self._functions = default, functions

    @classmethod
    async def start(cls, reward: Reward, *, search: Sequence[str] = (), functions: Iterable[str] = ()) -> Scorer:
        """Load the rewards. `search`: folders in which a user's module is looked for first (`search_folders`).

        `functions` are those in use; `reward.function` alone if none is given. Each that is not inline has
        `reward.workers` processes. Raises UserError if a function does not exist, cannot be imported, or does not take
        the arguments.
        """
        started: dict[str, _One] = {}
        try:
            for function in sorted({*functions}) or [reward.function]:
                started[function] = await _One.start(function, reward, search)
        except BaseException:
            for one in started.values():
                await one.close()
            raise
        return cls(reward.function, started)

    @property
    def failures_in_a_row(self) -> int:
        """Completions in a row without a score, of the function that has most."""
        return max(one.failures_in_a_row for one in self._functions.values())

    def name(self, function: str | None) -> str:
        """The reward of a job, or of a prompt, that names `function`."""
        return function or self._default

    def version(self, function: str | None = None) -> str:
        """Version of the reward of a job that names `function`."""
        return self._functions[self.name(function)].version

    async def score(self, jobs: Sequence[ScoreJob]) -> list[Score]:
        """Scores in the order of the jobs.

        Raises UserError, quoting the last failure, when `reward.max_consecutive_failures` completions in a row of one
        function have none.
        """
        by_function: dict[str, list[int]] = {}
        for i, job in enumerate(jobs):
            by_function.setdefault(self.name(job.function), []).append(i)
        scores: dict[int, Score] = {}
        for function, numbers in by_function.items():
            found = await self._functions[function].score([jobs[i] for i in numbers])
            scores.update(zip(numbers, found, strict=True))
        return [scores[i] for i in range(len(jobs))]

    async def close(self) -> None:
        """End the worker processes, if there are any."""
        for one in self._functions.values():
            await one.close()
