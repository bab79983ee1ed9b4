"""reasoning-gym: items by name and seed, and the task's own score of right and wrong answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moe_asyncrl.config.recipe import Reward, Source
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompt import Prompt
from moe_asyncrl.data.sources.gym import TaskRows
from moe_asyncrl.data.sources.opening import open_prompts, task_seed
from moe_asyncrl.scoring.gym_answer import reward
from moe_asyncrl.scoring.score import ENTRY, Score, ScoreJob
from moe_asyncrl.scoring.scorer import Scorer, check_prompt

# Of different kinds; rearc scores tuples, knights_knaves has texts of numpy, countdown accepts any right expression.
TASKS = ("chain_sum", "leg_counting", "knights_knaves", "rearc", "countdown", "sudoku", "prime_factorization")


def rows(task: str, config: dict[str, Any] | None = None, seed: int = 3) -> TaskRows:
    prompts = open_prompts((Source(reasoning_gym=task, config=config or {}, size=20, seed=seed),), use="train", seed=0)
    found = prompts.parts[0].rows
    assert isinstance(found, TaskRows)
    return found


def score(prompt: Prompt, completion: str) -> float:
    return reward(prompt.text, completion, prompt.answer, {ENTRY: prompt.entry})


@pytest.mark.parametrize("task", TASKS)
def test_right_and_wrong_answers(task: str) -> None:
    items = rows(task)
    prompt, other = items[3], items[4]
    assert prompt.answer is not None and prompt.metadata == {"task": task} and prompt.source == f"{task}[3]"
    assert score(prompt, prompt.answer) == score(prompt, f"hm <answer> {prompt.answer} </answer>") == 1.0
    theirs = items._items
    for wrong in ("wrong", "", str(other.answer)):
        try:
            want = float(theirs.score_answer(wrong, theirs[3]))
        except ValueError:  # prime_factorization raises on what is no number
            want = 0.0
        assert score(prompt, wrong) == want < 1.0


def test_items_are_a_function_of_seed_and_number() -> None:
    first = [p.text for p in map(rows("chain_sum").__getitem__, range(5))]
    again = rows("chain_sum")
    assert [again[i].text for i in (4, 0, 2)] == [first[4], first[0], first[2]]
    assert [p.text for p in map(rows("chain_sum", seed=400).__getitem__, range(5))] != first


def test_settings_of_a_task_and_the_text_around_it() -> None:
    small = rows("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    assert all(-18 <= int(small[i].answer or "x") <= 18 for i in range(20))
    source = Source(reasoning_gym="chain_sum", system="Think.", instruction="In <answer></answer>.")
    (prompt, *_) = open_prompts((source,), use="train", seed=0, limit=2)
    assert prompt.messages is not None and prompt.messages[0] == {"role": "system", "content": "Think."}
    assert prompt.messages[1]["content"].endswith("\nIn <answer></answer>.")


def test_held_out_items_are_others_and_stay_when_the_runs_seed_changes() -> None:
    s = Source(reasoning_gym="chain_sum")
    seeds = [task_seed(s, "train", 0), task_seed(s, "train", 1), task_seed(s, "eval", 0)]
    assert task_seed(s, "eval", 1) == seeds[2]
    assert min(abs(a - b) for i, a in enumerate(seeds) for b in seeds[:i]) > 10_000_000  # more than any `size`
    assert task_seed(Source(reasoning_gym="chain_sum", seed=5), "eval", 1) == 5


@pytest.mark.parametrize(
    ("task", "config", "says"),
    [
        ("chain_sums", {}, "no task 'chain_sums'; did you mean 'chain_sum'?"),
        ("chain_sum", {"max_term": 3}, "reasoning_gym 'chain_sum': no setting 'max_term'; did you mean 'max_terms'?"),
        ("chain_sum", {"seed": 3}, "no setting 'seed'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 3}, "reasoning_gym 'chain_sum': "),
        ("chain_sum", {"min_terms": "many"}, "reasoning_gym 'chain_sum': "),
    ],
)
def test_what_no_task_takes(task: str, config: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as e:
        rows(task, config)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_each_job_goes_to_the_reward_that_it_names() -> None:
    item = rows("leg_counting")[0]
    jobs = [
        ScoreJob("", str(item.answer), item.answer, {ENTRY: item.entry}, "reasoning_gym"),
        ScoreJob("", "7", "7", {}),
        ScoreJob("", "7", "7", {}, "reasoning_gym"),  # no item of a task: a failure, not a 0
        ScoreJob("", "about 7", "7", {}),
    ]

    async def go() -> tuple[list[Score], list[str]]:
        scorer = await Scorer.start(Reward(function="exact"), functions=("exact", "reasoning_gym"))
        try:
            return await scorer.score(jobs), [scorer.version(), scorer.version("reasoning_gym")]
        finally:
            await scorer.close()

    scores, versions = asyncio.run(go())
    assert [s.rewards.get("total") for s in scores] == [1.0, 1.0, None, 0.0]
    assert scores[2].status == "failed" and "not an item of a reasoning-gym task" in scores[2].detail
    assert versions == ["exact@1", "reasoning_gym@0.1.25"]


def test_a_prompt_of_a_file_has_no_task() -> None:
    prompt = Prompt(source="f:1", prompt="x", messages=None, answer="1", metadata={})
    with pytest.raises(UserError, match="f:1: the reward 'reasoning_gym' scores items of reasoning-gym tasks only"):
        check_prompt(Reward(function="reasoning_gym"), prompt)
