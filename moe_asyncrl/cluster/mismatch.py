"""`moe-asyncrl mismatch RUN|CHECKPOINT`: where the gap between sampler and trainer comes from."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_asyncrl.cluster.run_setup import open_run
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError, first_line
from moe_asyncrl.data.recorded import Recorded, newest_first
from moe_asyncrl.data.trajectory import Trajectory
from moe_asyncrl.data.validate import ContractViolation
from moe_asyncrl.telemetry.bars import Bar, Panel, picture
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.train.checkpoint_folder import SIDE_FILE, read_info
from moe_asyncrl.train.mismatch.sources import choose_version, load, sources_of, touches

if TYPE_CHECKING:
    from moe_asyncrl.train.mismatch.causes import Mismatch


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the command line asks for."""

    target: str
    step: int | None = None
    limit: int = 64
    """Trajectories at most."""
    same_version: bool = False
    """Only tokens that the evaluated weights sampled."""
    max_kl: float | None = None
    max_abs: float | None = None
    as_json: bool = False
    picture: str | None = None


def mismatch(wanted: Wanted) -> int:
    """Print the report. Returns 0, or 1 if a bound does not hold.

    Raises `UserError` for what is neither a run nor a checkpoint, for a run without recorded trajectories or weights,
    and for trajectories that do not fit the model.
    """
    if wanted.limit < 1:
        raise UserError(f"--limit {wanted.limit}: at least 1")
    for name, bound in (("--max-kl", wanted.max_kl), ("--max-abs", wanted.max_abs)):
        if bound is not None and not 0 <= bound < float("inf"):
            raise UserError(f"{name} {bound}: a number that is at least 0")
    folder, recipe, version = opened(wanted.target)
    with warnings.catch_warnings():
        # Megatron warns of every package that it could use and does not find: nothing that a user of ours can act on.
        warnings.simplefilter("ignore")
        found, about = look(folder, recipe, version, wanted)
    from moe_asyncrl.train.mismatch.text import Bounds, as_values, lines

    bounds = Bounds(wanted.max_kl, wanted.max_abs)
    if wanted.picture is not None:
        path = Path(wanted.picture)
        try:
            path.write_text(drawn(found, about), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: the picture cannot be written: {first_line(error)}") from None
    if wanted.as_json:
        print(json.dumps(as_values(found, about, bounds), ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(lines(found, about, bounds)))
    return 1 if bounds.broken(found.gap) else 0


def opened(target: str) -> tuple[RunFolder, Recipe, int | None]:
    """A run and its recipe; with a checkpoint of it, also the version of that. Raises `UserError`."""
    path = Path(target)
    if (path / SIDE_FILE).is_file():
        return *open_run(str(path.resolve().parent.parent)), read_info(path).version
    if path.resolve().parent.name == "checkpoints":
        read_info(path)  # says what is missing
    return *open_run(target), None


def look(folder: RunFolder, recipe: Recipe, version: int | None, wanted: Wanted) -> tuple[Mismatch, dict[str, Any]]:
    """Read trajectories and weights, and take the gap apart. Raises `UserError`."""
    records = [r for r in newest_first(folder.trajectories) if wanted.step in (None, r.group.step)]
    if not records:
        of = "" if wanted.step is None else f" of step {wanted.step}"
        raise UserError(
            f"{folder.trajectories}: no trajectory{of} is recorded (telemetry.record_groups_per_step in the recipe)"
        )
    sources = sources_of(folder, recipe)
    evaluated = version
    if evaluated is None:
        evaluated = choose_version([r.group for r in records], sources, sampled=wanted.same_version)
    chosen = [r for r in records if touches(r.group, evaluated, sampled=wanted.same_version)] or records
    trajectories, steps = read_trajectories(chosen, wanted.limit)

    from moe_asyncrl.replay.rows import ReplayMismatch
    from moe_asyncrl.train.mismatch.tokens import tokens_from

    tokens = tokens_from(trajectories, version=evaluated if wanted.same_version else None)
    try:
        found = taken_apart(recipe, tokens, sources, evaluated)
    except (ReplayMismatch, ContractViolation) as error:
        raise UserError(f"{folder.trajectories}: {first_line(error)}") from None
    about = {
        "run": str(folder.path),
        "weights": str(sources[evaluated]),
        "trajectories": len(tokens.samples),
        "steps": [min(steps), max(steps)],
    }
    return found, about


def read_trajectories(records: Sequence[Recorded], limit: int) -> tuple[list[Trajectory], list[int]]:
    """At most `limit` trajectories, and the steps that they come from. What is damaged is left out with a line.

    Raises `UserError` if nothing can be read.
    """
    found: list[Trajectory] = []
    steps: list[int] = []
    for record in records:
        if len(found) >= limit:
            break
        try:
            found += record.trajectories()[: limit - len(found)]
        except (ContractViolation, OSError) as error:
            print(f"moe-asyncrl: left out: {first_line(error)}", file=sys.stderr)
            continue
        steps.append(record.group.step)
    if not found:
        raise UserError("no recorded trajectory could be read")
    return found, steps


def taken_apart(recipe: Recipe, tokens: Any, sources: dict[int, Path], evaluated: int) -> Mismatch:
    """Build the model in this process and make the evaluations. Raises `UserError`, `ReplayMismatch`."""
    import torch
    import torch.distributed as dist

    from moe_asyncrl.config.capability import detect_capabilities
    from moe_asyncrl.models.layout import Layout
    from moe_asyncrl.models.spec import ModelSpec
    from moe_asyncrl.train.build import build_model_on_rank
    from moe_asyncrl.train.mismatch.causes import take_apart
    from moe_asyncrl.train.mismatch.lab import Lab, Setting
    from moe_asyncrl.train.parallel import ParallelRuntime
    from moe_asyncrl.train.passes import ModelOnRank

    spec = ModelSpec.from_hf(recipe.model.path).with_mtp(recipe.model.mtp)
    capabilities = detect_capabilities()
    layout = Layout()
    runtime = ParallelRuntime(capabilities, rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]

    def build(dtype: torch.dtype) -> ModelOnRank:
        return build_model_on_rank(spec, layout, capabilities, rank=0, dtype=dtype, distributed_optimizer=False)

    try:
        runtime.setup(layout)
        dtype: torch.dtype = getattr(torch, recipe.model.dtype)
        setting = Setting(
            temperature=recipe.rollout.temperature,
            replay=recipe.replay.mode == "r3",
            trainer_dtype=dtype,
            engine_dtype=getattr(torch, recipe.engine.dtype),
            micro_batch_tokens=recipe.trainer.micro_batch_tokens,
        )
        lab = Lab(tokens, setting, build(dtype), sources, evaluated, load=load, build=build)
        return take_apart(lab, lambda what: print(f"evaluating {what}", file=sys.stderr, flush=True))
    finally:
        runtime.close()


def drawn(found: Mismatch, about: dict[str, Any]) -> str:
    """The picture: what each control takes away, what is handled, and the flips of each layer."""
    whole = found.gap.kl
    causes = [Bar(f.cause, f.drop, f"{f.drop:.2e}, {f.share:.0%}", strong=f is found.named) for f in found.findings]
    causes.insert(0, Bar("the gap", whole, f"{whole:.2e}"))
    if found.rest is not None:
        causes.append(Bar("rest", found.rest.kl, f"{found.rest.kl:.2e}"))
    panels = [Panel("Drop of the mean k3 when one cause is controlled (nats a token)", tuple(causes))]
    if found.handled:
        bars = [Bar("as it is", whole, f"{whole:.2e}")]
        bars += [Bar(f"without {what}"[:24], gap.kl, f"{gap.kl:.2e}") for what, gap in found.handled]
        panels.append(Panel("Mean k3 if the trainer did without what it does already", tuple(bars)))
    if found.layers:
        flips = [Bar(f"layer {x.layer}", x.flips or 0.0, f"{x.flips or 0.0:.2%}") for x in found.layers]
        panels.append(Panel("Router decisions that the trainer would have made otherwise", tuple(flips)))
    return picture(f"{Path(about['run']).name}, version {found.version}: sampler against trainer", panels)
