"""The reward of a recipe: a built-in rule or a user's function, with the account of what could not be scored."""

from __future__ import annotations

import os
from collections.abc import Sequence

from moe_asyncrl.config.recipe import Reward
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompts import Prompt
from moe_asyncrl.scoring.pool import RewardPool
from moe_asyncrl.scoring.rules import RULES, last_number
from moe_asyncrl.scoring.score import TOTAL, Score, ScoreJob
from moe_asyncrl.scoring.user import split_name

RULES_VERSION = "1"


def check_prompt(reward: Reward, prompt: Prompt) -> None:
    """Raise UserError, naming file and line, if the rule could not score any completion of this prompt."""
    if reward.function not in RULES:
        return
    if prompt.answer is None:
        raise UserError(f"{prompt.source}: `answer` is missing; the reward {reward.function!r} needs it")
    if reward.function == "numeric" and last_number(prompt.answer) is None:
        raise UserError(f"{prompt.source}: `answer` {prompt.answer!r} has no number; the reward 'numeric' needs one")


def search_folders(reward: Reward) -> tuple[str, ...]:
    """Where a user's module is looked for first: the recipe's folder, then the working directory."""
    return (*(() if reward.folder is None else (reward.folder,)), os.getcwd())


class Scorer:
    """Scores completions. Rules run inline: they are linear in the text and cannot hang."""

    def __init__(self, reward: Reward, pool: RewardPool | None) -> None:
        self._reward = reward
        self._pool = pool
        self._rule = RULES.get(reward.function)
        self.version = pool.version if pool else f"{reward.function}@{RULES_VERSION}"
        self.failures_in_a_row = 0

    @classmethod
    async def start(cls, reward: Reward, *, search: Sequence[str] = ()) -> Scorer:
        """Load the reward. `search`: folders in which a user's module is looked for first (`search_folders`).

        Raises UserError if the function does not exist, cannot be imported, or does not take the arguments.
        """
        if reward.function in RULES:
            return cls(reward, None)
        split_name(reward.function)
        pool = await RewardPool.start(
            reward.function, search=search, workers=reward.workers, timeout_s=reward.timeout_s
        )
        return cls(reward, pool)

    async def score(self, jobs: Sequence[ScoreJob]) -> list[Score]:
        """Scores in the order of the jobs.

        Raises UserError, quoting the last failure, when `reward.max_consecutive_failures` completions in a row have
        none.
        """
        if self._pool is not None:
            scores = await self._pool.score(jobs)
        else:
            assert self._rule is not None
            scores = [Score("ok", {TOTAL: self._rule(j.completion, j.answer or "")}) for j in jobs]
        for score in scores:
            self._count(score)
        return scores

    def _count(self, score: Score) -> None:
        if score.status == "ok":
            self.failures_in_a_row = 0
            return
        self.failures_in_a_row += 1
        if self.failures_in_a_row >= self._reward.max_consecutive_failures:
            raise UserError(
                f"reward {self._reward.function!r}: {self.failures_in_a_row} completions in a row could not be scored"
                f" (reward.max_consecutive_failures); the last one: {score.detail}"
            )

    async def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._pool is not None:
            await self._pool.close()
