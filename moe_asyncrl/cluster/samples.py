"""`moe-asyncrl samples RUN`: recorded trajectories as text, with what the run knows of each token."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

from moe_asyncrl.cluster.look_back import run_folder
from moe_asyncrl.config.load import RecipeError, load_recipe
from moe_asyncrl.data.errors import UserError, first_line
from moe_asyncrl.data.recorded import Recorded, newest_first
from moe_asyncrl.data.trajectory import Trajectory
from moe_asyncrl.data.validate import ContractViolation
from moe_asyncrl.models.tokenizer import Tokenizer
from moe_asyncrl.telemetry.run_folder import RunFolder


def samples(run: str, *, step: int | None, group: int | None, limit: int, tokens: bool, as_json: bool) -> int:
    """Print at most `limit` trajectories, the newest step first. Returns 0. Raises `UserError` if none is found."""
    if limit < 1:
        raise UserError(f"--limit {limit}: at least 1")
    folder = run_folder(run)
    found = _found(folder, step, group)
    first = next(found, None)
    if first is None:
        raise UserError(_none(folder, step, group))
    tokenizer = _tokenizer(folder)
    for recorded, trajectory in itertools.islice(itertools.chain([first], found), limit):
        sample = describe(recorded, trajectory, tokenizer, tokens=tokens)
        print(json.dumps(sample, ensure_ascii=False) if as_json else "\n".join(lines(sample)) + "\n")
    return 0


def _found(folder: RunFolder, step: int | None, group: int | None) -> Iterator[tuple[Recorded, Trajectory]]:
    for recorded in newest_first(folder.trajectories):
        if step in (None, recorded.group.step) and group in (None, recorded.group.index):
            try:
                trajectories = recorded.trajectories()
            except (ContractViolation, OSError) as error:
                print(f"moe-asyncrl: left out: {first_line(error)}", file=sys.stderr)
                continue
            yield from ((recorded, t) for t in trajectories)


def _none(folder: RunFolder, step: int | None, group: int | None) -> str:
    steps = [r.group.step for r in newest_first(folder.trajectories)]
    if not steps:
        return f"{folder.trajectories}: no trajectory is recorded (telemetry.record_groups_per_step in the recipe)"
    asked = " and ".join(f"{n} {v}" for n, v in (("step", step), ("group", group)) if v is not None)
    return f"{folder.trajectories}: nothing is recorded of {asked}; there are steps {min(steps)} to {max(steps)}"


def _tokenizer(folder: RunFolder) -> Tokenizer | None:
    """None, with a line that says why, if the model's folder cannot be read any more: ids are shown then."""
    try:
        return Tokenizer.load(load_recipe(folder.recipe).model.path)
    except (UserError, RecipeError, OSError) as error:
        print(f"moe-asyncrl: token ids instead of text: {first_line(error)}", file=sys.stderr)
        return None


def describe(recorded: Recorded, t: Trajectory, tokenizer: Tokenizer | None, *, tokens: bool) -> dict[str, Any]:
    """One trajectory as plain values. `tokens` adds a record for each token."""

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, keep_special=True) if tokenizer is not None else " ".join(map(str, ids))

    group, who = recorded.group, t.identity
    ids = t.tokens.tolist()
    answer_at = int(t.loss_mask.argmax()) if t.loss_mask.any() else t.length
    versions = t.weight_version[t.loss_mask]
    sample: dict[str, Any] = {
        "step": group.step,
        "group": group.index,
        "attempt": group.attempt,
        "sample": who.sample,
        "trajectory": who.trajectory,
        "source": who.prompt,
        "engine": who.engine,
        "reward": t.rewards.get("total"),
        "rewards": t.rewards,
        "staleness": group.version - t.oldest_version if versions.size else None,
        "versions": [int(versions.min()), int(versions.max())] if versions.size else None,
        "finish_reason": who.finish_reason,
        "sampled_tokens": int(t.loss_mask.sum()),
        "prompt": text(ids[:answer_at]),
        "completion": text(ids[answer_at:]),
        "answer": t.metadata.get("answer"),
    }
    if tokens:
        rows = zip(ids, t.loss_mask.tolist(), t.weight_version.tolist(), t.logprobs.tolist(), strict=True)
        sample["tokens"] = [
            {"id": i, "text": text([i]), "version": v if sampled else None, "logprob": p if sampled else None}
            for i, sampled, v, p in rows
        ]
    return sample


def lines(sample: dict[str, Any]) -> list[str]:
    """For people: texts are quoted, so that spaces and newlines show."""

    def known(form: str, value: Any) -> str:
        return "" if value is None else form.format(value)

    versions = sample["versions"]
    head = [
        f"step {sample['step']}",
        f"group {sample['group']}",
        f"sample {sample['sample']}",
        known("reward {:g}", sample["reward"]),
        known("staleness {}", sample["staleness"]),
        "" if versions is None else f"versions {versions[0]} to {versions[1]}",
        f"{sample['sampled_tokens']} tokens",
        known("ended by {}", sample["finish_reason"] or None),
        sample["engine"],
    ]
    found = ["  ".join(part for part in head if part)]
    for name in ("prompt", "completion", "answer"):
        if sample[name] is not None:
            found.append(f"  {name:11}{json.dumps(sample[name], ensure_ascii=False)}")
    for t in sample.get("tokens", ()):
        text = json.dumps(t["text"], ensure_ascii=False)
        rest = "prompt" if t["logprob"] is None else f"version {t['version']:<6} log-probability {t['logprob']:.4f}"
        found.append(f"  {t['id']:>8}  {text:16} {rest}")
    return found
