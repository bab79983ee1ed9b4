"""What a recipe must satisfy beyond the bounds of single fields. Pure."""

from __future__ import annotations

from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.config.sources import check_sources


def check(r: Recipe) -> tuple[str, str] | None:
    """The first contradiction as (field, what is wrong and what to do), or None."""
    t = r.trainer
    if r.engine.tp % r.engine.ep:
        return "engine.ep", f"must divide engine.tp ({r.engine.tp}), found {r.engine.ep}"
    etp = t.etp if t.etp is not None else t.tp
    if (t.tp * t.cp * t.dp) % (t.ep * etp):
        return (
            "trainer.ep",
            f"ep x etp ({t.ep} x {etp}) must divide tp x cp x dp ({t.tp} x {t.cp} x {t.dp}); "
            "raise trainer.dp or lower trainer.ep",
        )
    if t.vpp is not None and t.pp == 1:
        return "trainer.vpp", "needs trainer.pp of at least 2"
    if r.rollout.max_new_tokens >= r.model.max_context:
        return (
            "rollout.max_new_tokens",
            f"{r.rollout.max_new_tokens} leaves no room for a prompt in model.max_context {r.model.max_context}",
        )
    if r.rollout.top_k == 1:
        return (
            "rollout.top_k",
            "1 leaves the sampler no choice: every log-probability is 0, and nothing is learned; "
            "set 0 (all tokens), or at least 2",
        )
    if r.algorithm.objective == "grpo" and r.rollout.group_size < 2:
        return "rollout.group_size", "group-relative advantages need at least 2 samples for each prompt"
    if r.algorithm.objective == "sft" and (r.algorithm.kl_coef > 0 or r.model.reference is not None):
        field = "algorithm.kl_coef" if r.algorithm.kl_coef > 0 else "model.reference"
        return field, "supervised learning has no KL to a reference model; leave it out"
    if r.algorithm.updates_per_batch > r.rollout.groups_per_step:
        return "algorithm.updates_per_batch", f"more updates than groups in a batch ({r.rollout.groups_per_step})"
    capacity = r.buffer.capacity_groups
    if capacity is not None and capacity < r.rollout.groups_per_step:
        return "buffer.capacity_groups", f"less than one batch (rollout.groups_per_step {r.rollout.groups_per_step})"
    if r.weights.every > r.buffer.max_staleness + 1:
        return (
            "weights.every",
            f"with buffer.max_staleness {r.buffer.max_staleness} the trainer would starve; "
            f"at most {r.buffer.max_staleness + 1}",
        )
    if r.engine.colocated and (problem := _colocated(r)) is not None:
        return problem
    for place, sources in (("data.train", r.data.train), ("data.eval", r.data.eval), ("warmup.data", r.warmup.data)):
        problem = check_sources(sources) if isinstance(sources, tuple) else None
        if problem is not None:
            return f"{place}{problem[0]}", problem[1]
    if t.timeout_s < 2 * r.weights.timeout_s:
        return (
            "trainer.timeout_s",
            f"{t.timeout_s:g} is less than twice weights.timeout_s ({r.weights.timeout_s:g}): the other ranks wait in "
            "one collective while the first one goes through several steps of an update",
        )
    return None


def _colocated(r: Recipe) -> tuple[str, str] | None:
    why = "with engine.colocated servers give back their memory before each step"
    if r.weights.every != 1:
        return "weights.every", f"{why}, and the weights in it: they need new ones after each; set 1"
    if r.weights.interrupt != "retract":
        return "weights.interrupt", f"{why}, and the KV cache in it: running requests compute it anew; set retract"
    if r.weights.delta != "off":
        return "weights.delta", f"{why}: they hold nothing that changes could be made to; set off"
    if r.weights.transport not in ("shared_memory", "disk"):
        return (
            "weights.transport",
            f"{r.weights.transport} joins trainer and servers in NCCL groups, which take one process a GPU; with "
            "engine.colocated set shared_memory",
        )
    return None
