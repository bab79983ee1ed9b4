"""Faults planted between the rows and the routers, in each worker."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.batch import Sample
from tests.replay.jobs import OBJECTIVE, batches_of, build


def second_decoder(layout: Layout, *, hf_dir: str, given: list[Sample]) -> None:
    """The decoder is built twice, and the replay hangs on the copy that is never called."""
    from moe_asyncrl.train.replay_hooks import routers_of
    from moe_asyncrl.train.step import gradients

    model, second = build(layout, hf_dir), build(layout, hf_dir)
    for _, router in routers_of(model.chunks, model.spec, layout, model.pp_rank):
        router.router_replay = None
    wrong = dataclasses.replace(model, replay=second.replay)
    gradients(wrong, batches_of(given, wrong, tokens=48), OBJECTIVE, mode="replay")


def another_router(layout: Layout, *, hf_dir: str) -> tuple[tuple[int, ...], bool]:
    """A router outside the decoder, as a multi-token-prediction layer has one: the layers that replay drives, and
    whether it left that router alone."""
    from moe_asyncrl.train.replay_hooks import attach_replay, routers_of

    model, second = build(layout, hf_dir), build(layout, hf_dir)
    _, extra = routers_of(second.chunks, model.spec, layout, model.pp_rank)[0]
    extra.router_replay = None
    model.chunks[-1].mtp = torch.nn.ModuleDict({"router": extra})
    replay = attach_replay(model.chunks, model.spec, layout, pp_rank=model.pp_rank, rank=model.rank)
    assert replay is not None
    return replay.layers, extra.router_replay is None


def rows_out_of_step(layout: Layout, *, hf_dir: str, given: list[Sample], plant: str) -> None:
    """Rows of a micro-batch too many or too few in the routers' queues, or those of a dense layer as well."""
    from moe_asyncrl.train import passes
    from moe_asyncrl.train.step import gradients

    model = build(layout, hf_dir)
    batches = batches_of(given, model, tokens=48)
    push, pushed = passes._push, 0

    def planted(replay: Any, model: Any, batch: Any, **options: Any) -> None:
        nonlocal pushed
        pushed += 1
        if plant == "dense layer counted":
            assert batch.rows is not None
            batch = dataclasses.replace(batch, rows=torch.cat([batch.rows[:, :1], batch.rows], dim=1))
        if plant != "too few" or pushed < len(batches):
            push(replay, model, batch, **options)
        if plant == "too many" and pushed == 1:
            push(replay, model, batch, **options)

    passes._push = planted
    try:
        gradients(model, batches, OBJECTIVE, mode="replay")
    finally:
        passes._push = push


def after_padding(layout: Layout, *, hf_dir: str, given: list[Sample], table: Any) -> int:
    """Every row behind the first sequence stands one token too late: tokens that the witness saw with wrong experts."""
    from moe_asyncrl.train.score import logprobs_of_batches
    from tests.replay.matrix_jobs import Witness

    model = build(layout, hf_dir)
    batches = batches_of(given, model, tokens=4096, multiple=16)
    witness = Witness(model, table)
    for batch in batches:
        assert batch.rows is not None
        end = batch.routed_owners[0].end
        batch.rows[end:] = batch.rows[end:].roll(1, 0)
    logprobs_of_batches(model, batches, temperature=1.0, mode="replay")
    return sum(counts["wrong"] for counts in witness.take().values())
