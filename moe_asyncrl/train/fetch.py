"""The arrays that one rank needs of a batch, and the samples made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from moe_asyncrl.data.validate import ContractViolation, known_rows
from moe_asyncrl.data.wire import TrajectoryHeader, check_binding
from moe_asyncrl.replay.rows import Coverage, ReplayMismatch, check_rows, coverage
from moe_asyncrl.train.batch import MicroBatch, Sample, make_micro_batch
from moe_asyncrl.train.passes import ModelOnRank
from moe_asyncrl.train.plan import UpdatePlan

Arrays = Mapping[str, np.ndarray]
"""Arrays of one trajectory by wire field."""


def fields_for(model: ModelOnRank, *, replay: bool) -> tuple[str, ...]:
    """Wire fields that this rank needs: what its stage feeds, what its routers replay, what its loss reads.

    A stage that is neither first nor last gets tokens only to check that the routing rows belong to them.
    """
    fields: list[str] = ["tokens"]
    if replay:
        # The sampling mask is part of the digest that binds rows to tokens.
        fields += ["routing.experts", "sampling_mask.indptr", "sampling_mask.ids"]
    if model.has_last_stage:
        fields += ["loss_mask", "logprobs", "weight_version"]
    return tuple(fields)


def sample_from(header: TrajectoryHeader, arrays: Arrays, *, weight: float, advantage: float, replay: bool) -> Sample:
    """One trajectory as a sample. Flags and log-probabilities stay empty where the rank has no loss.

    Raises:
        ContractViolation: the arrays do not fit the header, or the rows do not belong to the tokens.
    """
    name = header.identity.trajectory
    tokens = arrays.get("tokens")
    if tokens is None or tokens.shape != (header.length,):
        raise ContractViolation(f"trajectory {name}: tokens are missing or not {header.length}")
    experts = arrays.get("routing.experts") if replay else None
    if replay:
        check_binding(header, arrays)
    trained = arrays.get("loss_mask")
    return Sample(
        name=name,
        tokens=tokens,
        trained=np.zeros(header.length, dtype=np.bool_) if trained is None else trained,
        weight=weight,
        advantage=advantage,
        sampler_logprobs=arrays.get("logprobs"),
        experts=experts,
        known=None if experts is None else known_rows(header.routing_runs, header.length - 1),
    )


def micro_batches_from(
    plan: UpdatePlan,
    arrays: Mapping[str, Arrays],
    model: ModelOnRank,
    *,
    replay: bool,
    allow_missing: bool,
) -> list[MicroBatch]:
    """This rank's micro-batches of one update. Rows are checked here, before any rank is inside a collective.

    Raises:
        ContractViolation: arrays do not fit their headers.
        ReplayMismatch: a routing row cannot be, or is missing without permission; names trajectory, row, layer, rank.
    """
    router = model.router_shape if replay else None
    layers = range(model.spec.num_moe_layers)
    batches = []
    for numbers in plan.packing.ranks[model.layout.coordinates(model.rank).dp]:
        samples = [
            sample_from(
                plan.headers[i],
                arrays[plan.headers[i].identity.trajectory],
                weight=plan.weights[i],
                advantage=plan.advantages[i],
                replay=replay,
            )
            for i in numbers
        ]
        batch = make_micro_batch(samples, multiple=model.multiple, router=router, device=model.device, rank=model.rank)
        if batch.rows is not None and batch.known is not None:
            check_rows(
                batch.rows,
                batch.known,
                batch.owners,
                num_experts=model.spec.num_experts,
                layers=layers,
                rank=model.rank,
            )
            if not allow_missing and not bool(batch.known.all()):
                token = int((~batch.known).nonzero()[0])
                owner = next(o for o in batch.owners if o.start <= token < o.end)
                raise ReplayMismatch(
                    f"trajectory {owner.name}, row {token - owner.start}, all MoE layers, rank {model.rank}: the "
                    "sampler reported no routing; set replay.allow_missing to route such rows live"
                )
        batches.append(batch)
    return batches


def coverage_of(headers: Sequence[TrajectoryHeader], arrays: Mapping[str, Arrays]) -> Coverage:
    """Rows of the trajectories, how many are known, and how many were routed by the weights that sampled their token.

    A trajectory that carries no routing at all counts with all of its rows, none of them known.
    """
    total = Coverage(0, 0, 0)
    for h in headers:
        a = arrays[h.identity.trajectory]
        total += coverage(h.routing_runs, a["loss_mask"], a["weight_version"])
    return total
