"""The rule `math`: what counts as equal, what as wrong, and what as no score at all."""

from __future__ import annotations

import asyncio
import concurrent.futures

import pytest

from moe_asyncrl.config.recipe import Reward
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompt import Prompt
from moe_asyncrl.scoring.math_answer import UnreadableReference, reference, reward
from moe_asyncrl.scoring.score import Score, ScoreJob
from moe_asyncrl.scoring.scorer import Scorer, check_prompt

TABLE = [
    ("so it is \\boxed{72}.", "72", 1.0),
    ("48/2 = 24, and 48 + 24 = 72", "Natalia sold 48/2 = 24 clips.\n#### 72", 1.0),
    ("The answer is 1200", "#### 1,200", 1.0),
    ("$\\frac{3}{4}$", "0.75", 1.0),
    ("\\boxed{0.75}", "\\frac{3}{4}", 1.0),
    ("\\boxed{3/4}", "$\\frac{6}{8}$", 1.0),
    ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", 1.0),
    ("\\boxed{x^2+2x+1}", "$(x+1)^2$", 1.0),
    ("\\boxed{\\{2,1\\}}", "\\{1,2\\}", 1.0),
    ("\\boxed{(-\\infty, 3]}", "\\left(-\\infty, 3\\right]", 1.0),
    ("\\boxed{50\\%}", "0.5", 1.0),
    ("\\boxed{B}", "\\text{(B)}", 1.0),
    ("It is \\boxed{1}. " + "No, that counts the one in the middle twice. " * 4 + "\\boxed{2}", "2", 1.0),
    ("\\boxed{1} and \\boxed{2}", "\\{1,2\\}", 1.0),  # close together they are a set
    ("\\boxed{1} and \\boxed{2}", "2", 0.0),
    ("\\boxed{73}", "72", 0.0),
    ("\\boxed{\\frac{4}{3}}", "\\frac{3}{4}", 0.0),
    ("\\boxed{(1,2]}", "(1,2)", 0.0),
    ("\\boxed{x^2+1}", "$(x+1)^2$", 0.0),
    ("72 it was, now it is 5", "72", 0.0),
    ("no idea", "72", 0.0),
    ("", "72", 0.0),
    ("\\boxed{}", "72", 0.0),
    ("\\boxed{\\frac{}", "72", 0.0),
]


@pytest.mark.parametrize(("completion", "answer", "value"), TABLE)
def test_right_and_wrong(completion: str, answer: str, value: float) -> None:
    assert reward("", completion, answer, {}) == value


@pytest.mark.parametrize("answer", ["", "  ", "####", "$$", "\\boxed{}"])
def test_a_reference_that_says_nothing_is_no_zero(answer: str) -> None:
    with pytest.raises(UnreadableReference, match="nothing that math-verify can read"):
        reference(answer)


def test_it_works_on_another_thread() -> None:
    """Its own timeouts are signals and would raise there."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(reward, "", "\\boxed{7}", "7", {}).result(60) == 1.0


def test_in_processes_of_its_own() -> None:
    jobs = [ScoreJob("", c, a, {}) for c, a, _ in TABLE[:4]]
    jobs += [ScoreJob("", "\\boxed{1}", "$$", {}), jobs[0]]

    async def go() -> tuple[list[Score], str]:
        scorer = await Scorer.start(Reward(function="math", timeout_s=60))
        try:
            return await scorer.score(jobs), scorer.version()
        finally:
            await scorer.close()

    scores, version = asyncio.run(go())
    assert [s.rewards.get("total") for s in scores[:4]] == [1.0] * 4 and scores[5].rewards["total"] == 1.0
    assert scores[4].status == "failed" and "nothing that math-verify can read" in scores[4].detail
    assert version == "math@0.9.0"


def test_a_prompt_without_an_answer_is_found_before_the_run() -> None:
    def prompt(answer: str | None) -> Prompt:
        return Prompt(source="f:1", prompt="x", messages=None, answer=answer, metadata={})

    check_prompt(Reward(function="math"), prompt("\\frac12"))
    for answer, says in ((None, "`answer` is missing; the reward 'math' needs it"), (" ", "`answer` is empty")):
        with pytest.raises(UserError, match=f"f:1: {says}"):
            check_prompt(Reward(function="math"), prompt(answer))
