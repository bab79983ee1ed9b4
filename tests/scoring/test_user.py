"""Reward functions of the user's own: what they may return, and what happens when they misbehave."""

from __future__ import annotations

import asyncio
import os
import pathlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import psutil
import pytest

from moe_asyncrl.config.recipe import Reward
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompts import Prompt
from moe_asyncrl.scoring.score import Score, ScoreJob
from moe_asyncrl.scoring.scorer import Scorer, check_prompt

T = TypeVar("T")
REWARDS = """
import asyncio, os, time

def by_name(prompt, completion, answer, metadata):
    match completion:
        case "good": return 1.0
        case "bool": return True
        case "parts": return {"style": 0.25, "fact": 0.5}
        case "total": return {"style": 0.25, "total": 3}
        case "numpy":
            import numpy
            return numpy.float32(0.5)
        case "raise": raise KeyError("odd completion")
        case "nan": return float("nan")
        case "inf": return float("inf")
        case "part nan": return {"a": 1.0, "b": float("nan")}
        case "none": return None
        case "text": return "1.0"
        case "empty": return {}
        case "huge": return 10 ** 400
        case "hang": time.sleep(600)
        case "exit": raise SystemExit(3)
        case "crash": os._exit(9)
        case "print":
            print("x" * 100000)
            os.write(1, b"y" * 1000)
            return 2.0
        case "args": return {"total": float(len(prompt)), "answer": float(answer), "meta": float(metadata["level"])}

async def gently(prompt, completion, answer, metadata):
    if completion == "block": time.sleep(600)
    if completion == "hang": await asyncio.sleep(600)
    if completion == "raise": raise ValueError("no")
    if completion == "timeout error": raise TimeoutError("its own")
    return 1.0

waiting = []

async def together(prompt, completion, answer, metadata):
    waiting.append(completion)
    while len(waiting) < 16:
        await asyncio.sleep(0.01)
    return 1.0

class Judge:
    async def __call__(self, prompt, completion, answer, metadata):
        return 4.0

judge = Judge()
not_callable = 3

def three(a, b, c):
    return 0.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("rewards")
    (path / "own_rewards.py").write_text(REWARDS)
    (path / "broken_rewards.py").write_text("import no_such_module_at_all\n")
    (path / "wrong_rewards.py").write_text("def reward(:\n")
    return path


def jobs(*completions: str) -> list[ScoreJob]:
    return [ScoreJob("1+1=", c, "2", {"level": 3}) for c in completions]


def with_scorer(
    folder: pathlib.Path, function: str, use: Callable[[Scorer], Coroutine[Any, Any, T]], **fields: Any
) -> T:
    async def go() -> T:
        scorer = await Scorer.start(Reward(function=function, **fields), search=[str(folder)])
        try:
            return await use(scorer)
        finally:
            await scorer.close()

    return asyncio.run(go())


def scores(folder: pathlib.Path, function: str, completions: Sequence[str], **fields: Any) -> list[Score]:
    return with_scorer(folder, function, lambda s: s.score(jobs(*completions)), **fields)


def test_what_may_come_back(folder: pathlib.Path) -> None:
    got = scores(folder, "own_rewards:by_name", ["good", "bool", "parts", "total", "numpy", "print", "args"])
    assert [s.status for s in got] == ["ok"] * 7
    assert [s.rewards for s in got] == [
        {"total": 1.0},
        {"total": 1.0},
        {"style": 0.25, "fact": 0.5, "total": 0.75},
        {"style": 0.25, "total": 3.0},
        {"total": 0.5},
        {"total": 2.0},  # what it prints is not taken for an answer
        {"total": 4.0, "answer": 2.0, "meta": 3.0},
    ]


FAILURES = {
    "raise": "raised KeyError: 'odd completion'",
    "nan": "returned nan (float)",
    "inf": "returned inf (float)",
    "part nan": "returned nan (float) for 'b'",
    "none": "returned None (NoneType)",
    "text": "returned '1.0' (str)",
    "empty": "empty dict",
    "huge": "expected a finite number",
    "exit": "ended with exit status 3",
    "crash": "ended with exit status 9",
}


def test_a_failure_is_named_and_never_a_reward_of_zero(folder: pathlib.Path) -> None:
    """Fault 39: the others of the batch keep their scores, the odd one has none."""
    got = scores(folder, "own_rewards:by_name", [c for bad in FAILURES for c in ("good", bad)])
    assert [s.status for s in got[::2]] == ["ok"] * len(FAILURES)
    for score, says in zip(got[1::2], FAILURES.values(), strict=True):
        assert score.status == "failed" and score.rewards == {} and says in score.detail
        assert score.report("v").value is None and score.report("v").status == "failed"


def test_a_raise_names_the_line(folder: pathlib.Path) -> None:
    (bad,) = scores(folder, "own_rewards:by_name", ["raise"])
    line = REWARDS.splitlines().index('        case "raise": raise KeyError("odd completion")') + 1
    assert f"own_rewards.py:{line}" in bad.detail


def test_a_hang_is_killed_and_the_rest_goes_on(folder: pathlib.Path) -> None:
    got = scores(folder, "own_rewards:by_name", ["good", "hang", "good", "hang", "good"], timeout_s=1.0)
    assert [s.status for s in got] == ["ok", "timeout", "ok", "timeout", "ok"]
    assert "longer than 1 s" in got[1].detail and got[1].rewards == {}


def test_async_functions_run_side_by_side(folder: pathlib.Path) -> None:
    got = scores(folder, "own_rewards:together", ["x"] * 16, timeout_s=60)  # each waits for all the others
    assert [s.rewards for s in got] == [{"total": 1.0}] * 16
    assert scores(folder, "own_rewards:judge", ["x"])[0].rewards == {"total": 4.0}


def test_async_failures(folder: pathlib.Path) -> None:
    got = scores(folder, "own_rewards:gently", ["x", "hang", "raise", "timeout error", "x"], timeout_s=1.0)
    assert [s.status for s in got] == ["ok", "timeout", "failed", "failed", "ok"]
    assert "its own" in got[3].detail


def test_an_async_function_that_blocks_is_found(folder: pathlib.Path) -> None:
    got = scores(folder, "own_rewards:gently", ["x", "block", "x"], timeout_s=1.0)
    assert [s.status for s in got] == ["ok", "timeout", "ok"]


def test_several_processes_share_the_work(folder: pathlib.Path) -> None:
    got = scores(folder, "own_rewards:by_name", ["good", "crash"] * 8 + ["parts"], workers=2)
    assert [s.status for s in got] == ["ok", "failed"] * 8 + ["ok"]
    assert got[-1].rewards["total"] == 0.75


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("no_such_rewards:reward", "no module 'no_such_rewards'"),
        ("own_rewards:missing", "has no 'missing'"),
        ("own_rewards:not_callable", "is not callable"),
        ("own_rewards:three", "must take (prompt, completion, answer, metadata)"),
        ("broken_rewards:reward", "No module named 'no_such_module_at_all'"),
        ("wrong_rewards:reward", "SyntaxError"),
        ("own_rewards", "nor `module:function`"),
        ("exakt", "nor `module:function`"),
    ],
)
def test_what_cannot_be_loaded_is_found_at_the_start(folder: pathlib.Path, function: str, says: str) -> None:
    with pytest.raises(UserError) as e:
        scores(folder, function, ["x"])
    assert says in str(e.value) and "\n" not in str(e.value)


def test_many_failures_in_a_row_end_the_run_with_the_last_one(folder: pathlib.Path) -> None:
    async def use(scorer: Scorer) -> None:
        await scorer.score(jobs("raise", "raise", "good"))  # a success starts the count anew
        await scorer.score(jobs("raise"))
        with pytest.raises(UserError, match=r"3 completions in a row could not be scored.*returned nan"):
            await scorer.score(jobs("raise", "nan"))

    with_scorer(folder, "own_rewards:by_name", use, max_consecutive_failures=3)


def test_cancelled_scoring_does_not_mix_answers(folder: pathlib.Path) -> None:
    async def use(scorer: Scorer) -> None:
        first = asyncio.create_task(scorer.score(jobs("good", "hang")))
        await asyncio.sleep(0.5)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert [s.rewards for s in await scorer.score(jobs("parts", "good"))] == [
            {"style": 0.25, "fact": 0.5, "total": 0.75},
            {"total": 1.0},
        ]

    with_scorer(folder, "own_rewards:by_name", use)


def test_no_worker_outlives_a_parent_that_is_killed(folder: pathlib.Path) -> None:
    """A fresh process, because it is killed while its worker hangs."""
    code = textwrap.dedent("""
        import asyncio, psutil, sys
        from moe_asyncrl.config.recipe import Reward
        from moe_asyncrl.scoring.scorer import Scorer
        from moe_asyncrl.scoring.score import ScoreJob
        async def main():
            scorer = await Scorer.start(Reward(function="own_rewards:by_name", timeout_s=600), search=[sys.argv[1]])
            print(psutil.Process().children()[0].pid, flush=True)
            await scorer.score([ScoreJob("", "hang", None, {})])
        asyncio.run(main())
    """)
    parent = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.3)
    assert worker.is_running()
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    psutil.wait_procs([worker], timeout=10)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_the_recipes_folder_goes_before_the_working_directory(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_asyncrl.scoring.scorer import search_folders

    (tmp_path / "own_rewards.py").write_text("def by_name(*a): return -1.0\n")
    monkeypatch.chdir(tmp_path)
    assert search_folders(Reward(folder=str(folder))) == (str(folder), os.getcwd())
    assert scores(folder, "own_rewards:by_name", ["good"])[0].rewards == {"total": 1.0}


def test_prompts_that_a_rule_could_never_score() -> None:
    def prompt(answer: str | None) -> Prompt:
        return Prompt(source="f.jsonl:7", prompt="p", messages=None, answer=answer, metadata={})

    for function in ("exact", "numeric"):
        with pytest.raises(UserError, match=r"^f\.jsonl:7: `answer` is missing"):
            check_prompt(Reward(function=function), prompt(None))
    with pytest.raises(UserError, match=r"^f\.jsonl:7: `answer` 'seven' has no number"):
        check_prompt(Reward(function="numeric"), prompt("seven"))
    check_prompt(Reward(function="own:reward"), prompt(None))
    check_prompt(Reward(function="exact"), prompt("seven"))
