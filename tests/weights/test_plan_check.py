"""Errors planted in plans: each kind is found, wherever it is planted, in both modes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.fuse import fused_group
from moe_asyncrl.weights.plan import Deliveries, Parts, Pieces, Plan, Receivers, Sends
from moe_asyncrl.weights.plan_check import check, problems
from moe_asyncrl.weights.plan_make import make_plan
from tests.train.parity_jobs import tiny_spec

SPEC = tiny_spec()
LAYOUT = Layout(tp=2, dp=4, ep=4, pp=2)
ENGINES = (EngineLayout(tp=4, ep=4, attention_dp=2, redundant_experts=4),) * 2 + (EngineLayout(tp=2),)
PLANS = {
    (mode, size): make_plan(SPEC, LAYOUT, ENGINES, mode=mode, dtype="float32", bucket_bytes=size)
    for mode in ("broadcast", "direct")
    for size in (20_000, 1 << 20)
}


def drop_piece(plan: Plan, at: int) -> Plan:
    n = at % len(plan.pieces.part)
    return replace(plan, pieces=Pieces(np.delete(plan.pieces.part, n), np.delete(plan.pieces.block, n)))


def double_piece(plan: Plan, at: int) -> Plan:
    n = at % len(plan.pieces.part)
    return replace(plan, pieces=Pieces(*(np.insert(c, n, c[n]) for c in (plan.pieces.part, plan.pieces.block))))


def test_more_roots_than_allowed_are_found_and_fewer_are_no_error() -> None:
    for bound in (1, 2, 3):
        plan = make_plan(SPEC, LAYOUT, ENGINES, dtype="float32", bucket_bytes=20_000, roots_per_stage=bound)
        check(plan)
        assert len(plan.senders) == 2 * bound
        if bound > 1:
            with pytest.raises(UserError, match=f"stage 0 has more than {bound - 1} roots"):
                check(replace(plan, roots_per_stage=bound - 1))


def drop_part(plan: Plan, at: int) -> Plan:
    """A slice that nobody gets: its part and pieces are gone, and its bucket too if that is then empty."""
    p, n = plan.parts, at % len(plan.parts.tensor)
    keep = plan.pieces.part != n
    part = plan.pieces.part[keep]
    columns = [np.delete(c, n, axis=0) for c in (p.tensor, p.low, p.high, p.bucket, p.offset)]
    return replace(plan, parts=Parts(*columns), pieces=Pieces(part - (part > n), plan.pieces.block[keep]))


def double_part(plan: Plan, at: int) -> Plan:
    """The same rectangle once more, at the end of its bucket or of the first one with room."""
    p, n = plan.parts, at % len(plan.parts.tensor)
    bucket = int(p.bucket[n])
    offset = -(-int(plan.bucket_nbytes[bucket]) // 64) * 64
    nbytes = plan.bucket_nbytes.copy()
    nbytes[bucket] = offset + plan.part_nbytes[n]
    own = plan.pieces.part == n
    values = (p.tensor[n], p.low[n : n + 1], p.high[n : n + 1], bucket, offset)
    columns = [
        np.append(c, v if np.ndim(v) else [v], axis=0)
        for c, v in zip((p.tensor, p.low, p.high, p.bucket, p.offset), values, strict=True)
    ]
    pieces = Pieces(
        np.append(plan.pieces.part, np.full(own.sum(), len(p.tensor))),
        np.append(plan.pieces.block, plan.pieces.block[own]),
    )
    return replace(plan, parts=Parts(*columns), pieces=pieces, bucket_nbytes=nbytes, bucket_bytes=1 << 30)


def narrow_part(plan: Plan, at: int) -> Plan:
    """Its last row is not sent, to anybody."""
    many = np.flatnonzero(plan.parts.high[:, 0] - plan.parts.low[:, 0] > 1)
    high = plan.parts.high.copy()
    high[many[at % len(many)], 0] -= 1
    parts = replace(plan.parts, high=high)
    changed = replace(plan, parts=parts)
    keep = np.prod(changed.piece_slices[1], axis=1) > 0
    return replace(changed, pieces=Pieces(plan.pieces.part[keep], plan.pieces.block[keep]))


def split_fused(plan: Plan, at: int) -> Plan:
    """The second of two fused tensors goes into a bucket of its own, delivered like the first one's."""
    p = plan.parts
    group = [fused_group(SPEC.family, tensor.name) for tensor in plan.tensors]
    second = [
        n
        for n in range(1, len(p.tensor))
        if p.bucket[n] == p.bucket[n - 1] and group[p.tensor[n]] == group[p.tensor[n - 1]]
    ]
    n = second[at % len(second)]
    old, new = int(plan.parts.bucket[n]), len(plan.bucket_nbytes)
    bucket, offset = plan.parts.bucket.copy(), plan.parts.offset.copy()
    bucket[n], offset[n] = new, 0
    deliveries, sends = plan.deliveries, plan.sends
    mine = plan.blocks.holder[plan.pieces.block[plan.pieces.part == n]]
    for delivery in np.flatnonzero(deliveries.bucket == old):
        number = len(deliveries.bucket)
        deliveries = Deliveries(
            np.append(deliveries.bucket, new),
            np.append(deliveries.receivers, deliveries.receivers[delivery]),
            np.append(deliveries.root, deliveries.root[delivery]),
        )
        own = (sends.delivery == delivery) & np.isin(sends.holder, mine)
        sends = Sends(
            np.append(sends.delivery, np.full(own.sum(), number)),
            np.append(sends.holder, sends.holder[own]),
            np.append(sends.source, sends.source[own]),
        )
    # What the old bucket's senders have left in it.
    left = {
        (int(b), int(h)) for b, h in zip(bucket[plan.pieces.part], plan.blocks.holder[plan.pieces.block], strict=True)
    }
    keep = np.array(
        [(int(deliveries.bucket[d]), int(h)) in left for d, h in zip(sends.delivery, sends.holder, strict=True)]
    )
    sends = Sends(sends.delivery[keep], sends.holder[keep], sends.source[keep])
    nbytes = np.append(plan.bucket_nbytes, plan.part_nbytes[n])
    return replace(
        plan,
        parts=replace(plan.parts, bucket=bucket, offset=offset),
        bucket_nbytes=nbytes,
        deliveries=deliveries,
        sends=sends,
    )


def missing_replica(plan: Plan, at: int) -> Plan:
    """One of the ranks that get a bucket does not."""
    d = plan.deliveries
    n = at % len(d.bucket)
    members = plan.members(int(d.receivers[n]))
    left = [m for i, m in enumerate(members) if i != at % len(members)]
    sets = [Receivers((engine,), (rank,)) for engine, rank in left]
    numbers = np.arange(len(plan.receivers), len(plan.receivers) + len(sets))
    own = plan.sends.delivery == n
    new = np.arange(len(d.bucket), len(d.bucket) + len(sets))
    deliveries = Deliveries(
        np.append(d.bucket, np.full(len(sets), d.bucket[n])),
        np.append(d.receivers, numbers),
        np.append(d.root, np.full(len(sets), d.root[n])),
    )
    keep = np.delete(np.arange(len(deliveries.bucket)), n)
    sends = Sends(
        np.concatenate([plan.sends.delivery, *(np.full(own.sum(), k) for k in new)]),
        np.concatenate([plan.sends.holder, *([plan.sends.holder[own]] * len(sets))]),
        np.concatenate([plan.sends.source, *([plan.sends.source[own]] * len(sets))]),
    )
    stay = sends.delivery != n
    return replace(
        plan,
        receivers=(*plan.receivers, *sets),
        deliveries=Deliveries(deliveries.bucket[keep], deliveries.receivers[keep], deliveries.root[keep]),
        sends=Sends(np.searchsorted(keep, sends.delivery[stay]), sends.holder[stay], sends.source[stay]),
    )


def double_delivery(plan: Plan, at: int) -> Plan:
    d, n = plan.deliveries, at % len(plan.deliveries.bucket)
    own = plan.sends.delivery == n
    return replace(
        plan,
        deliveries=Deliveries(*(np.append(c, c[n]) for c in (d.bucket, d.receivers, d.root))),
        sends=Sends(
            np.append(plan.sends.delivery, np.full(own.sum(), len(d.bucket))),
            np.append(plan.sends.holder, plan.sends.holder[own]),
            np.append(plan.sends.source, plan.sends.source[own]),
        ),
    )


def wrong_source(plan: Plan, at: int) -> Plan:
    n = at % len(plan.sends.source)
    source = plan.sends.source.copy()
    holds = plan.blocks.holders.ranks(int(plan.sends.holder[n]))
    others = [rank for rank in range(LAYOUT.world_size) if rank not in holds]
    source[n] = others[at % len(others)]
    return replace(plan, sends=replace(plan.sends, source=source))


def drop_send(plan: Plan, at: int) -> Plan:
    n = at % len(plan.sends.source)
    s = plan.sends
    return replace(plan, sends=Sends(*(np.delete(c, n) for c in (s.delivery, s.holder, s.source))))


def double_send(plan: Plan, at: int) -> Plan:
    n = at % len(plan.sends.source)
    s = plan.sends
    return replace(plan, sends=Sends(*(np.append(c, c[n]) for c in (s.delivery, s.holder, s.source))))


def small_bucket(plan: Plan, at: int) -> Plan:
    return replace(plan, bucket_bytes=int(plan.bucket_nbytes.max()) - 1)


def moved(plan: Plan, at: int, by: int) -> Plan:
    n = at % len(plan.parts.offset)
    offset = plan.parts.offset.copy()
    offset[n] += by
    return replace(plan, parts=replace(plan.parts, offset=offset))


def wrong_root(plan: Plan, at: int) -> Plan:
    n = at % len(plan.deliveries.bucket)
    root = plan.deliveries.root.copy()
    root[n] = (root[n] + LAYOUT.world_size // 2) % LAYOUT.world_size if plan.mode == "broadcast" else 0
    return replace(plan, deliveries=replace(plan.deliveries, root=root))


def nowhere(plan: Plan, at: int) -> Plan:
    source = plan.sends.source.copy()
    source[at % len(source)] = LAYOUT.world_size
    return replace(plan, sends=replace(plan.sends, source=source))


FAULTS: dict[str, tuple[Callable[[Plan, int], Plan], str]] = {
    "dropped piece": (drop_piece, r"of \d+ elements are sent|nobody sends|a rank is to send what is not"),
    "doubled piece": (double_piece, "is sent twice"),
    "dropped part": (drop_part, "does not get a slice of"),
    "doubled part": (double_part, "gets twice a slice of"),
    "last row dropped": (narrow_part, "does not get a slice of"),
    "fused pair split": (split_fused, "gets the fused tensors of|its buckets are not its own"),
    "missing replica": (missing_replica, r"engine \d rank \d does not get bucket|does not get a slice of"),
    "doubled delivery": (double_delivery, "is delivered twice to engine"),
    "wrong source": (wrong_source, r"rank \d+ is to send slices that it does not hold"),
    "dropped send": (drop_send, "nobody sends what rank"),
    "doubled send": (double_send, "sent twice to the same receivers"),
    "bucket too large": (small_bucket, "more than"),
    "misaligned": (lambda plan, at: moved(plan, at, 4), "not a multiple of 64"),
    "past the end": (lambda plan, at: moved(plan, at, 1 << 21), "behind the bucket's"),
    "wrong root": (wrong_root, "not a rank of that stage|but is not broadcast"),
    "rank that is not there": (nowhere, "there is no trainer rank 16"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_error_is_found(fault: str) -> None:
    plant, message = FAULTS[fault]

    @settings(max_examples=12, deadline=None)
    @given(st.sampled_from(sorted(PLANS)), st.integers(0, 10**6))
    def found(which: tuple[str, int], at: int) -> None:
        wrong = plant(PLANS[which], at)
        assert any(re.search(message, line) for line in problems(wrong))
        with pytest.raises(UserError, match="the plan of the weight update is wrong") as caught:
            check(wrong)
        assert "\n" not in str(caught.value)

    found()


def test_overlapping_parts_are_found() -> None:
    for plan in PLANS.values():
        second = np.flatnonzero(plan.parts.offset > 0)[0]
        assert any("overlap" in line for line in problems(moved(plan, int(second), -64)))


def test_plans_without_an_error_pass() -> None:
    for plan in PLANS.values():
        assert problems(plan) == []


def test_a_redundant_expert_and_an_attention_group_are_served() -> None:
    """The two kinds of copies inside of one engine, each left out by hand."""
    plan = PLANS["direct", 1 << 20]
    for name, ranks in (("experts.0.gate_proj", {0, 2}), ("layers.0.self_attn.q_proj", {0, 1, 2, 3})):
        number = next(n for n, t in enumerate(plan.tensors) if name in t.name)
        buckets = np.unique(plan.parts.bucket[plan.parts.tensor == number])
        of = np.flatnonzero(np.isin(plan.deliveries.bucket, buckets))
        served = {m for d in of for m in plan.members(int(plan.deliveries.receivers[d])) if m[0] == 0}
        assert {rank for _, rank in served} == ranks
        for delivery in of:
            if any(engine < 2 for engine, _ in plan.members(int(plan.deliveries.receivers[delivery]))):
                with pytest.raises(UserError, match="does not get"):
                    check(missing_replica(plan, int(delivery)))
