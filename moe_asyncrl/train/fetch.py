"""The arrays that one rank needs of a batch, and the samples made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moe_asyncrl.buffer.client import BufferClient
from moe_asyncrl.data.messages import HeldGroup
from moe_asyncrl.data.provenance import other_version
from moe_asyncrl.data.row_slices import RowSlice
from moe_asyncrl.data.validate import ContractViolation, known_rows
from moe_asyncrl.data.wire import TrajectoryHeader, routing_spec
from moe_asyncrl.replay.rows import Coverage, ReplayMismatch, check_rows, coverage, name_of
from moe_asyncrl.train.batch import MicroBatch, Sample, make_micro_batch
from moe_asyncrl.train.passes import ModelOnRank
from moe_asyncrl.train.plan import UpdatePlan
from moe_asyncrl.train.rank_positions import positions_of_rank
from moe_asyncrl.train.sampler_side import FIELDS, sampler_side

Arrays = Mapping[str, np.ndarray]
"""Arrays of one trajectory by wire field."""


def fields_for(model: ModelOnRank) -> tuple[str, ...]:
    """Wire fields that this rank needs: what its stage feeds, what its loss reads. Routing rows come by `fetch_rows`.

    A stage that is neither first nor last gets tokens only to check that the routing rows belong to them.
    """
    fields: list[str] = ["tokens"]
    if model.has_last_stage:
        fields += ["weight_version", *FIELDS]
    return tuple(fields)


def rows_needed(plan: UpdatePlan, model: ModelOnRank) -> dict[str, npt.NDArray[np.int64]]:
    """By trajectory, the routing rows of the positions that this rank's routers see: int64, rising."""
    needed = {}
    for numbers in plan.packing.ranks[model.layout.coordinates(model.rank).dp]:
        headers = [plan.headers[i] for i in numbers]
        at = positions_of_rank([h.length - 1 for h in headers], model.layout, model.rank)
        for k, h in enumerate(headers):
            needed[h.identity.trajectory] = np.sort(at.rows_of(k))
    return needed


def fetch_rows(
    client: BufferClient,
    step: int,
    plan: UpdatePlan,
    groups: Sequence[HeldGroup],
    arrays: Mapping[str, Arrays],
    model: ModelOnRank,
) -> dict[str, RowSlice]:
    """This rank's own part of the routing rows of one update: its positions, its layers, nothing else.

    Raises:
        ContractViolation: a row is not the one of its token; names trajectory, row, layers and rank.
        ReplayMismatch: rows of another number of layers or experts than the model has.
    """
    router = model.router_shape
    if router is None:
        return {}
    headers = [h for g in groups for h in g.headers]
    for h in headers:
        spec = routing_spec(h)
        if spec is not None and spec.shape[1:] != (router.layers, router.top_k):
            raise ReplayMismatch(
                f"trajectory {h.identity.trajectory}, rank {model.rank}: routing rows {list(spec.shape)} for "
                f"{h.length - 1} input tokens, {router.layers} MoE layers and {router.top_k} experts a token"
            )
    tokens = {name: a["tokens"] for name, a in arrays.items()}
    try:
        return client.fetch_rows(step, headers, rows_needed(plan, model), router.here, tokens)
    except ContractViolation as error:
        raise ContractViolation(f"rank {model.rank}: {error}") from None


def sample_from(
    header: TrajectoryHeader,
    arrays: Arrays,
    rows: RowSlice | None,
    *,
    weight: float,
    advantage: float,
    vocabulary: int,
    temperature: float | None = None,
    mask_other: bool = False,
) -> Sample:
    """One trajectory as a sample. Flags, log-probabilities and masks stay empty where the rank has no loss.

    `rows`: the rank's part of its routing, None where nothing is replayed or nothing was recorded. `mask_other`: tokens
    predicted by rows of other weights are left out of the loss.

    Raises:
        ContractViolation: the arrays do not fit the header, sampling masks do not fit their tokens, or tokens were
            sampled at another `temperature`.
    """
    name = header.identity.trajectory
    tokens = arrays.get("tokens")
    if tokens is None or tokens.shape != (header.length,):
        raise ContractViolation(f"trajectory {name}: tokens are missing or not {header.length}")
    trained, logprobs, mask = arrays.get("loss_mask"), None, None
    if trained is not None:
        logprobs, mask = sampler_side(header, arrays, vocabulary=vocabulary, temperature=temperature)
    if mask_other and trained is not None and header.other_version_sampled:
        trained = trained.copy()
        trained[1:] &= ~other_version(header.routing_runs, arrays["loss_mask"], arrays["weight_version"])
    return Sample(
        name=name,
        tokens=tokens,
        trained=np.zeros(header.length, dtype=np.bool_) if trained is None else trained,
        weight=weight,
        advantage=advantage,
        sampler_logprobs=logprobs,
        mask=mask,
        experts=None if rows is None else rows.experts,
        rows_at=None if rows is None else rows.rows,
        known=None if rows is None else known_rows(header.routing_runs, header.length - 1),
    )


def micro_batches_from(
    plan: UpdatePlan,
    arrays: Mapping[str, Arrays],
    model: ModelOnRank,
    *,
    rows: Mapping[str, RowSlice] | None,
    allow_missing: bool,
    temperature: float | None = None,
    mask_other: bool = False,
) -> list[MicroBatch]:
    """This rank's micro-batches of one update. Rows are checked here, before any rank is inside a collective.

    `rows`: this rank's part of the routing by trajectory; None where nothing is replayed.

    Raises:
        ContractViolation: arrays do not fit their headers.
        ReplayMismatch: a routing row cannot be, or is missing without permission; names trajectory, row, layer, rank.
    """
    router = model.router_shape if rows is not None else None
    batches = []
    for numbers in plan.packing.ranks[model.layout.coordinates(model.rank).dp]:
        samples = [
            sample_from(
                plan.headers[i],
                arrays[plan.headers[i].identity.trajectory],
                None if rows is None else rows.get(plan.headers[i].identity.trajectory),
                weight=plan.weights[i],
                advantage=plan.advantages[i],
                vocabulary=model.spec.vocab_size,
                temperature=temperature,
                mask_other=mask_other,
            )
            for i in numbers
        ]
        batch = make_micro_batch(
            samples,
            layout=model.layout,
            router=router,
            device=model.device,
            rank=model.rank,
            vocabulary=model.vocabulary,
        )
        if router is not None and batch.rows is not None and batch.known is not None:
            check_rows(
                batch.rows,
                batch.known,
                batch.routed_owners,
                num_experts=model.spec.num_experts,
                layers=router.here,
                rank=model.rank,
            )
            if not allow_missing and not bool(batch.known.all()):
                token = int((~batch.known).nonzero()[0])
                raise ReplayMismatch(
                    f"{name_of(batch.routed_owners, token)}, all MoE layers, rank {model.rank}: the sampler reported "
                    "no routing; set replay.allow_missing to route such rows live"
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
