"""All ranks' work on random layouts, carried out in one process: every element comes once, with the right value."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.shards import rank_shards
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.fill import WeightFiller
from moe_asyncrl.weights.letters import Letter, in_order, sizes
from moe_asyncrl.weights.message import dense_header, message_bytes, open_message, seal
from moe_asyncrl.weights.message_part import part_view
from moe_asyncrl.weights.plan import Mode, Plan
from moe_asyncrl.weights.plan_check import check
from moe_asyncrl.weights.plan_make import make_plan
from moe_asyncrl.weights.work import Work, rank_work, schedule, streams_of, streams_to
from tests.models.strategies import DENSE, MOE
from tests.weights.plan_cases import kept, numbered, plan_cases
from tests.weights.test_plan import Case

FAMILIES = (*DENSE, *MOE)


def parameters(spec: ModelSpec, layout: Layout, rank: int, hf: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """A rank's Megatron parameters, made of numbered HF tensors; numbers stay exact in float32 below 2 ** 24."""
    found = {}
    for shard in rank_shards(spec, layout, rank):
        local = torch.zeros(shard.shape)
        for block in shard.blocks:
            value = torch.from_numpy(hf[block.hf.name][block.hf_slices].astype(np.float32))
            local[block.local_slices] = block.to_local(value)
        found[shard.entry.name] = local
    return found


def carried_out(plan: Plan, hf: dict[str, np.ndarray]) -> dict[tuple[int, int], torch.Tensor]:
    """Sealed messages by (stream, number), as all ranks make them."""
    works = [rank_work(plan, rank) for rank in range(plan.layout.world_size)]
    fillers = [
        WeightFiller(work, [dense_header(m.parts) for m in work.sends], parameters(plan.spec, plan.layout, rank, hf))
        for rank, work in enumerate(works)
    ]
    letters = in_order([announce(work, filler) for work, filler in zip(works, fillers, strict=True)])
    device = torch.device("cpu")
    given = {
        (source, to, turn): data
        for source, filler in enumerate(fillers)
        for turn in range(max(map(len, letters.values())))
        for data, to in filler.gives(turn, device)
    }
    made = {}
    for sender, own in letters.items():
        for turn, letter in enumerate(own):
            message = torch.full((letter.nbytes,), 255, dtype=torch.uint8)
            filler = fillers[sender]
            filler.begin(turn, letter, message)
            for arrival in filler.arrivals(turn, letter, message):
                arrival.into.copy_(given.pop((arrival.source, sender, turn)))
                filler.end(turn, arrival, message)
            header = filler.header(turn, letter, message)
            seal(message, kind="dense", epoch=3, version=7, stream=letter.stream, number=letter.number, header=header)
            made[letter.stream, letter.number] = message
    assert not given, "something is given that nobody takes"
    return made


def announce(work: Work, filler: WeightFiller) -> list[Letter]:
    return [
        Letter(work.rank, m.stream, -1, message_bytes(h, m.payload_bytes), len(h))
        for m, h in zip(work.sends, filler.headers, strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_engine_rank_gets_every_element_once_with_its_value(family: str) -> None:
    @settings(max_examples=5, deadline=None)
    @given(plan_cases(family), st.sampled_from(("broadcast", "direct")), st.sampled_from((0, 1, 2)))
    def right(case: Case, mode: Mode, roots: int) -> None:
        spec, layout, engines, bucket_bytes = case
        plan = make_plan(
            spec, layout, engines, mode=mode, dtype="float32", bucket_bytes=bucket_bytes, roots_per_stage=roots
        )
        check(plan)
        hf = numbered(spec)
        made = carried_out(plan, hf)
        streams = streams_of(plan)
        works = [rank_work(plan, rank) for rank in range(layout.world_size)]
        letters = in_order([announce(w, WeightFiller(w, [dense_header(m.parts) for m in w.sends], {})) for w in works])
        for engine, sizes_of in enumerate(engines):
            plans = schedule(plan, streams, sizes(letters), engine)
            assert len(plans) in (1, sizes_of.tp)
            assert {s for p in plans for s, _ in p} == {s.number for s in streams_to(plan, streams, engine)}
            for rank in range(sizes_of.tp):
                got = received(plans[rank % len(plans)], made, hf)
                for name, value in hf.items():
                    keeps = kept(spec, sizes_of, name, value.shape, rank) if mode == "direct" else True
                    assert np.array_equal(got[name], np.where(keeps, value, 0)), (name, engine, rank)

    right()


def received(
    order: tuple[tuple[int, int], ...], made: dict[tuple[int, int], torch.Tensor], hf: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What a rank has after its schedule; 0 where nothing came. Fails where something comes twice."""
    got = {name: np.zeros(value.shape, np.int64) for name, value in hf.items()}
    numbers: dict[int, int] = defaultdict(int)
    for stream, nbytes in order:
        message = made[stream, numbers[stream]]
        assert len(message) == nbytes
        opened = open_message(message, epoch=3, version=7, stream=stream, number=numbers[stream])
        numbers[stream] += 1
        for part in opened.parts:
            into = got[part.name][part.slices]
            assert not into.any(), f"{part.name} comes twice"
            into[...] = part_view(part, opened.payload).numpy().astype(np.int64)
    return got


def test_a_bound_on_the_roots_makes_fewer_streams_and_the_same_bytes() -> None:
    from moe_asyncrl.weights.engine_layout import EngineLayout
    from tests.train.parity_jobs import tiny_spec

    spec, layout = tiny_spec(), Layout(tp=2, dp=4, ep=4, pp=2)
    for bound in (0, 1, 2):
        plan = make_plan(
            spec, layout, (EngineLayout(),) * 2, dtype="float32", bucket_bytes=20_000, roots_per_stage=bound
        )
        assert len(streams_of(plan)) == (2 * bound or 16)
        work = [rank_work(plan, rank) for rank in range(layout.world_size)]
        assert sum(m.payload_bytes for w in work for m in w.sends) == plan.bucket_nbytes.sum()
