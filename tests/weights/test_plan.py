"""Plans of every family on hundreds of layouts: checked, and carried out element by element on small ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.shards import rank_shards
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.fuse import fused_group
from moe_asyncrl.weights.plan import Mode, Plan
from moe_asyncrl.weights.plan_check import check
from moe_asyncrl.weights.plan_make import make_plan
from moe_asyncrl.weights.plan_units import ALIGNMENT
from moe_asyncrl.weights.trainer_blocks import trainer_blocks
from tests.models.strategies import DENSE, MOE, specs_and_layouts
from tests.train.parity_jobs import tiny_spec
from tests.weights.plan_cases import kept, numbered, plan_cases

FAMILIES = (*DENSE, *MOE)
MODES: tuple[Mode, ...] = ("broadcast", "direct")
Case = tuple[ModelSpec, Layout, tuple[EngineLayout, ...], int]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_plan_is_right(family: str) -> None:
    """64 pairs of a trainer and engines for each family, in both modes: 512 in all."""

    @settings(max_examples=64, deadline=None)
    @given(plan_cases(family))
    def right(case: Case) -> None:
        spec, layout, engines, bucket_bytes = case
        for mode in MODES:
            plan = make_plan(spec, layout, engines, mode=mode, dtype="float32", bucket_bytes=bucket_bytes)
            check(plan)
            sources_are_balanced(plan)

    right()


def sources_are_balanced(plan: Plan) -> None:
    """The bound of `plan_sources`: what a rank sends is at most the mean of those that could, and one thing more."""
    load = np.zeros(plan.layout.world_size)
    jobs: list[tuple[int, tuple[int, ...], int]] = []
    holders = plan.blocks.holders
    if plan.mode == "broadcast":
        for bucket, root in zip(plan.deliveries.bucket, plan.deliveries.root, strict=True):
            pieces = plan.parts.bucket[plan.pieces.part] == bucket
            ep = {int(rank) for rank in plan.blocks.holder[plan.pieces.block[pieces]]}
            possible = set().union(*(holders.ranks(h) for h in ep))
            jobs.append((int(root), tuple(possible), int(plan.bucket_nbytes[bucket])))
    else:
        bucket = plan.parts.bucket[plan.pieces.part]
        holder = plan.blocks.holder[plan.pieces.block]
        for delivery, number, source in zip(plan.sends.delivery, plan.sends.holder, plan.sends.source, strict=True):
            own = (bucket == plan.deliveries.bucket[delivery]) & (holder == number)
            copies = len(plan.members(int(plan.deliveries.receivers[delivery])))
            nbytes = int(plan.piece_nbytes[own].sum()) * copies
            jobs.append((int(source), holders.ranks(int(number)), nbytes))
    for source, _, nbytes in jobs:
        load[source] += nbytes
    for rank in np.flatnonzero(load):
        assert any(
            load[rank] <= load[list(possible)].mean() + nbytes for source, possible, nbytes in jobs if source == rank
        )


@settings(max_examples=60, deadline=None)
@given(specs_and_layouts())
def test_blocks_are_what_the_ranks_hold(case: tuple[ModelSpec, Layout]) -> None:
    """Against `rank_shards`, rank by rank, block by block."""
    spec, layout = case
    blocks, tensors = trainer_blocks(spec, layout), parameter_map(spec).hf_tensors()
    theirs: dict[int, set[tuple[str, tuple[range, ...]]]] = {rank: set() for rank in range(layout.world_size)}
    for n in range(len(blocks.tensor)):
        tensor = tensors[blocks.tensor[n]]
        ranges = tuple(
            range(int(blocks.low[n, a]), int(blocks.high[n, a]), int(blocks.step[n, a]))
            for a in range(len(tensor.shape))
        )
        for rank in blocks.holders.ranks(int(blocks.holder[n])):
            assert (tensor.name, ranges) not in theirs[rank]
            theirs[rank].add((tensor.name, ranges))
    for rank, found in theirs.items():
        shards = [s for s in rank_shards(spec, layout, rank) if not s.entry.tied_copy]
        assert found == {(block.hf.name, block.hf_ranges) for shard in shards for block in shard.blocks}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_carried_out_gives_every_rank_what_its_loader_keeps(family: str) -> None:
    """Elements are numbered; sources have only what `rank_shards` gives them; receivers read parts out of buckets."""

    @settings(max_examples=12, deadline=None)
    @given(plan_cases(family), st.sampled_from(MODES))
    def carried_out(case: Case, mode: Mode) -> None:
        spec, layout, engines, bucket_bytes = case
        plan = make_plan(spec, layout, engines, mode=mode, dtype="float32", bucket_bytes=bucket_bytes)
        hf = numbered(spec)
        held = [holdings(spec, layout, rank, hf) for rank in range(layout.world_size)]
        buckets: dict[tuple[int, int], dict[int, np.ndarray]] = {}
        layouts: dict[int, dict[int, tuple[str, tuple[range, ...]]]] = {}
        for t in plan.transfers():
            slices = tuple(slice(r.start, r.stop, r.step) for r in t.slice)
            value = held[t.source][t.tensor.name][slices]
            assert (value > 0).all(), "the source does not hold it"
            layouts.setdefault(t.bucket, {})[t.offset] = (t.tensor.name, t.part)
            shape = tuple(len(r) for r in t.part)
            count = int(np.prod(shape))
            inner = tuple(
                slice(a.start - b.start, a.stop - b.start, a.step) for a, b in zip(t.slice, t.part, strict=True)
            )
            for engine, rank in plan.members(plan.receivers.index(t.receivers)):
                mine = buckets.setdefault((engine, rank), {})
                if t.bucket not in mine:
                    mine[t.bucket] = np.zeros(int(plan.bucket_nbytes[t.bucket]), np.uint8)
                there = mine[t.bucket][t.offset : t.offset + 4 * count].view(np.int32).reshape(shape)[inner]
                assert not there.any(), "written twice"
                there[...] = value
        for engine, sizes in enumerate(engines):
            for rank in range(sizes.tp):
                mine = buckets.get((engine, rank), {})
                got = {name: np.zeros_like(value) for name, value in hf.items()}
                for bucket, memory in mine.items():
                    for offset, (name, part) in layouts[bucket].items():
                        assert offset % ALIGNMENT == 0
                        into = got[name][tuple(slice(r.start, r.stop) for r in part)]
                        assert not into.any(), "received twice"
                        into[...] = memory[offset : offset + 4 * into.size].view(np.int32).reshape(into.shape)
                for name, value in hf.items():
                    keeps = kept(spec, sizes, name, value.shape, rank) if mode == "direct" else True
                    assert np.array_equal(got[name], np.where(keeps, value, 0)), name

    carried_out()


def holdings(spec: ModelSpec, layout: Layout, rank: int, hf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What one trainer rank holds of each HF tensor; 0 where it holds nothing."""
    found = {name: np.zeros_like(value) for name, value in hf.items()}
    for shard in rank_shards(spec, layout, rank):
        for block in shard.blocks:
            found[block.hf.name][block.hf_slices] = hf[block.hf.name][block.hf_slices]
    return found


@pytest.mark.parametrize("mode", MODES)
def test_fused_tensors_lie_together_and_what_is_larger_is_cut(mode: Mode) -> None:
    spec = tiny_spec()
    engines = (EngineLayout(tp=2, ep=2),)
    for bucket_bytes in (64, 4096, 1 << 20):
        plan = make_plan(spec, Layout(tp=2, dp=2, ep=2), engines, mode=mode, dtype="float32", bucket_bytes=bucket_bytes)
        check(plan)
        assert plan.bucket_nbytes.max() <= bucket_bytes
        where: dict[str, set[int]] = {}
        for tensor, bucket in zip(plan.parts.tensor, plan.parts.bucket, strict=True):
            where.setdefault(fused_group(spec.family, plan.tensors[tensor].name), set()).add(int(bucket))
        qkv = where["model.layers.0.self_attn.qkv_proj"]
        assert (len(qkv) == 1 if mode == "broadcast" else len(qkv) <= 2) == (bucket_bytes == 1 << 20)


def test_a_plan_does_not_change() -> None:
    spec, layout, engines = tiny_spec(), Layout(tp=2, dp=4, ep=4), (EngineLayout(tp=4, ep=2, attention_dp=2),) * 3
    for mode in MODES:
        plans = [make_plan(spec, layout, engines, mode=mode, bucket_bytes=4096) for _ in range(2)]
        assert list(plans[0].transfers()) == list(plans[1].transfers())


def test_all_copies_and_all_stages_send() -> None:
    """Every rank of the trainer is a source, and the busiest has little more than the mean."""
    spec = tiny_spec()
    for layout in (Layout(dp=4, ep=2), Layout(tp=2, dp=4, ep=4, pp=2), Layout(pp=4, dp=2)):
        for mode in MODES:
            plan = make_plan(spec, layout, (EngineLayout(tp=4, ep=4),) * 4, mode=mode, bucket_bytes=2048)
            senders = plan.deliveries.root if mode == "broadcast" else plan.sends.source
            assert set(senders.tolist()) == set(range(layout.world_size))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engines": ()}, "no engine"),
        ({"dtype": "int8"}, "cannot travel as int8"),
        ({"bucket_bytes": 63}, "at least 64"),
        ({"engines": (EngineLayout(tp=4),)}, "intermediate_size 98 is not a multiple of tp 4"),
        ({"engines": (EngineLayout(tp=4, ep=4, redundant_experts=3, dense_replicated=True),)}, "slots for experts 11"),
        ({"engines": (EngineLayout(ep=1, placement=((0, 1),)),)}, "2 slots, not 8"),
        ({"engines": (EngineLayout(placement=((0,) * 8,)),)}, "each of 8 experts"),
        ({"engines": (EngineLayout(placement=(tuple(range(8)),) * 2),)}, "2 rows; give one, or 4"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(arguments: dict[str, object], message: str) -> None:
    spec = tiny_spec(intermediate_size=98)
    with pytest.raises(UserError, match=message) as caught:
        make_plan(spec, Layout(), **({"engines": (EngineLayout(),)} | arguments))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
