"""A user's own model, prompts and reward function, from a folder of theirs, through every command that they would use.

The reward raises, hangs or returns NaN on some completions, so that this one run also shows what becomes of those.
"""

from __future__ import annotations

import collections

import torch
import transformers
import yaml

from moe_asyncrl.config.load import load_recipe
from moe_asyncrl.telemetry.jsonl import read_jsonl
from tests.system.command import events, metrics, run_command, summary
from tests.system.user_run import STEPS, Done


def test_it_ends_well_and_says_so(done: Done) -> None:
    assert done.said.code == 0 and done.said.err == "", done.said
    lines = done.said.out.splitlines()
    assert lines[0] == f"run {done.folder.resolve()}"
    assert [line.split()[1] for line in lines if line.startswith("step")] == [f"{i}/{STEPS}" for i in range(1, 6)]
    assert lines[-2].startswith(f"ok: {STEPS} steps in ") and lines[-1] == str(done.folder.resolve() / "summary.json")


def test_what_it_leaves(done: Done) -> None:
    came_to = summary(done.folder)
    assert (came_to["status"], came_to["error"], came_to["steps"]) == ("ok", None, STEPS)
    assert came_to["replay_coverage"] == 1.0 and came_to["weight_versions"] == STEPS + 1
    # After so few steps both are the rounding of bfloat16; that replay lowers it is shown where the router has moved.
    assert 0 < came_to["kl_replay"] < 1e-3 and 0 < came_to["kl_live"] < 1e-3
    steps = metrics(done.folder, "step")
    assert [m["step"] for m in steps] == list(range(1, STEPS + 1))
    assert all(m["coverage"] == 1.0 and m["staleness_max"] <= 2 for m in steps)
    # The reference is the model that the run started from.
    assert steps[0]["kl_reference"] < 1e-6 < steps[-1]["kl_reference"]
    assert {m["version"] for m in metrics(done.folder, "eval")} == {0, STEPS}
    routing = list(read_jsonl(done.folder / "routing.jsonl"))
    assert [r["step"] for r in routing] == [m["step"] for m in metrics(done.folder, "probe")] == [2, 4, 5]
    for record in routing:
        loads = [[sum(row) for row in record[side]] for side in ("load_sampler", "load_trainer")]
        assert len(record["layers"]) == len(record["flips"]) == len(loads[0]) and loads[0] == loads[1]
        assert min(loads[0]) > 0 and max(record["flips"]) < 0.5
    spans = {(e["role"], e["span"]) for e in events(done.folder)}
    assert {("engine-0", "engine_start"), ("trainer-0", "step"), ("trainer-0", "update")} <= spans
    assert {("rollout-0", "generate"), ("rollout-0", "eval"), ("trainer-0", "checkpoint")} <= spans
    logs = {p.name for p in (done.folder / "logs").iterdir()}
    assert logs == {f"{r}.log" for r in ("buffer", "engine-0", "engine-0-sglang", "rollout-0", "trainer-0")}
    assert (done.home / "runs" / "latest").is_symlink() and (done.folder / "keys").stat().st_mode & 0o777 == 0o700


def test_the_resolved_recipe_reads_back(done: Done) -> None:
    resolved = load_recipe(done.folder / "recipe.yaml")
    written = yaml.safe_load((done.home / "recipe.yaml").read_text())
    assert resolved.rollout.max_new_tokens == written["rollout"]["max_new_tokens"]
    assert resolved.model.path == str((done.home / "model").resolve())
    assert resolved.reward.folder == str(done.home)


def test_rewards_that_fail_are_counted_and_never_zero(done: Done) -> None:
    """Every real reward is at least 1: a failure taken for 0 would pull a mean below it."""
    calls = collections.Counter((done.home / "calls.txt").read_text().split())
    assert all(calls[kind] > 0 for kind in ("raises", "hangs", "nan", "scores")), calls
    steps = metrics(done.folder, "step")
    assert all(m["reward"] >= 1.0 for m in steps)
    assert all(m["sequences"] <= 16 for m in steps) and sum(m["sequences"] for m in steps) < 16 * STEPS
    assert all(m["accuracy"] >= 1.0 for m in metrics(done.folder, "eval"))
    account = summary(done.folder)["trajectories"]
    evaluated = sum(m["failed"] for m in metrics(done.folder, "eval"))
    failed = calls["raises"] + calls["hangs"] + calls["nan"] - evaluated
    assert account["trained"] == sum(m["sequences"] for m in steps)
    # Groups that the end of the run overtook were scored and not delivered.
    assert account["failed"] >= max(1, failed - 16), (account, calls)
    assert account["sampled"] >= account["trained"] + account["failed"]
    log = (done.folder / "logs" / "rollout-0.log").read_text()
    assert "Traceback" not in log


def test_export_and_evaluation(done: Done) -> None:
    """The checkpoint becomes an HF directory that transformers loads, with other weights, and that can be evaluated."""
    said = run_command(done.home, "export", "runs/latest", "trained")
    assert said.code == 0 and said.out.strip() == "trained", said
    before = transformers.AutoModelForCausalLM.from_pretrained(done.home / "model", dtype=torch.float32)
    after = transformers.AutoModelForCausalLM.from_pretrained(done.home / "trained", dtype=torch.float32)
    changed = {n for (n, a), b in zip(before.named_parameters(), after.parameters(), strict=True) if not a.equal(b)}
    assert {"lm_head.weight", "model.layers.0.mlp.gate.weight", "model.layers.1.self_attn.q_proj.weight"} <= changed
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.home / "trained")
    ids = tokenizer("1+1=?", return_tensors="pt").input_ids
    assert torch.isfinite(after(ids).logits).all()
    again = run_command(done.home, "export", "runs/latest", "trained")
    assert again.code == 2 and len(again.err.splitlines()) == 1 and "trained" in again.err
    scored = run_command(done.home, "eval", "recipe.yaml", "model.path=trained", limit_s=270)
    assert scored.code == 0 and scored.out.startswith("accuracy 1."), scored
    assert " on " in scored.out and len(scored.out.splitlines()) == 1
