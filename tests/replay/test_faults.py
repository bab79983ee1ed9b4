"""Known ways in which replay goes wrong without a word in other systems: each is provoked, and stops the step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.replay.rows import ReplayMismatch
from moe_asyncrl.train.batch import RouterShape, make_micro_batch
from moe_asyncrl.train.rank_positions import positions_of_rank
from tests.pool.pool import WorkerFailed, WorkerPool
from tests.replay.matrix import Case, Matrix, experts_by_token, samples_for

FAMILY = "glm4_moe"
"""Its first layer is dense, and its published models have a multi-token-prediction layer."""


@pytest.fixture(scope="module")
def matrix(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(pool, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_a_row_for_the_dense_layer_stops_the_step(matrix: Matrix, layout: Layout) -> None:
    """Fault 26: a leading dense layer that is given a row shifts those of every layer behind it."""
    path, spec = matrix.model(FAMILY)
    given = samples_for(spec)
    whole = np.concatenate([given[2].experts[:, :1], given[2].experts], axis=1)  # type: ignore[index]
    counted = [*given[:2], dataclasses.replace(given[2], experts=whole), *given[3:]]
    with pytest.raises(WorkerFailed, match=r"trajectory t2, rank \d: routing rows \[24, 4, 2\].* 3 MoE layers"):
        matrix.pool.run("tests.replay.jobs:replayed", layout=layout, hf_dir=path, given=counted)
    job = "tests.replay.fault_jobs:rows_out_of_step"
    with pytest.raises(WorkerFailed, match=r"rank \d: rows of \[\d, 2\] given, this rank has \d MoE layers"):
        matrix.pool.run(job, layout=layout, hf_dir=path, given=given, plant="dense layer counted")
    # With the right shapes and every row one layer late, the witness, by Megatron-Core's own numbers, can tell.
    with pytest.raises(AssertionError, match="'wrong': "):
        matrix.run(Case(layout, "packed", "off", FAMILY), shifted=(2, 7))


def test_a_second_decoder_stops_the_step(matrix: Matrix) -> None:
    """Fault 27: rows that wait at routers which are never called."""
    path, spec = matrix.model(FAMILY)
    with pytest.raises(
        WorkerFailed, match=r"MoE layer 0, rank 0: rows of \d micro-batches were never used.*trajectory"
    ):
        matrix.pool.run("tests.replay.fault_jobs:second_decoder", layout=Layout(), hf_dir=path, given=samples_for(spec))


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (
            "too many",
            r"MoE layer 0, rank 0: rows of 1 micro-batches were never used in the forward pass, .*trajectory t",
        ),
        ("too few", r"MoE layer 0, rank 0: the router was called for \d+ tokens in the forward pass, but no rows"),
    ],
)
def test_rows_are_used_exactly_once(matrix: Matrix, plant: str, message: str) -> None:
    path, spec = matrix.model(FAMILY)
    job = "tests.replay.fault_jobs:rows_out_of_step"
    # Micro-batches differ in length, so one row too many may also meet a router that is called for other tokens.
    with pytest.raises(WorkerFailed, match=rf"{message}|experts given for \d+ tokens"):
        matrix.pool.run(job, layout=Layout(), hf_dir=path, given=samples_for(spec), plant=plant)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2)], ids=str)
def test_rows_shifted_by_padding_are_seen(matrix: Matrix, layout: Layout) -> None:
    """Fault 28: the matrix has padding in front of tokens (under cp behind every sequence) and finds no wrong row."""
    path, spec = matrix.model(FAMILY)
    wrong = matrix.pool.run(
        "tests.replay.fault_jobs:after_padding",
        layout=layout,
        hf_dir=path,
        given=samples_for(spec),
        table=experts_by_token(spec),
    )
    assert sum(wrong) > 100


def test_a_multi_token_prediction_layer_is_no_router_of_ours(matrix: Matrix) -> None:
    """Fault 29: it is not driven, and a row for it is refused."""
    path, spec = matrix.model(FAMILY)
    ((layers, alone),) = matrix.pool.run("tests.replay.fault_jobs:another_router", layout=Layout(), hf_dir=path)
    assert layers == (0, 1, 2) and alone
    given = samples_for(spec)
    more = np.concatenate([given[1].experts, given[1].experts[:, :1]], axis=1)  # type: ignore[index]
    router = RouterShape(layers=spec.num_moe_layers, experts=spec.num_experts, top_k=spec.experts_per_token)
    with pytest.raises(ReplayMismatch, match=r"trajectory t1, rank 0: routing rows \[1, 4, 2\]"):
        make_micro_batch([dataclasses.replace(given[1], experts=more)], router=router)


def test_a_rank_holds_its_own_rows_alone(matrix: Matrix) -> None:
    """Fault 31: over the ranks of a replica, every row of every layer is held once; padding comes to little."""
    _, spec = matrix.model(FAMILY)
    given = samples_for(spec)
    layout = Layout(tp=2, cp=2, pp=2, stage_layers=(2, 2))
    number = {layer: i for i, layer in enumerate(spec.moe_layer_indices)}
    lengths = [len(s.tokens) - 1 for s in given]
    held = 0
    for rank in range(layout.world_size):
        stage = layout.coordinates(rank).pp
        own = tuple(number[layer] for layer in layout.layers_of(stage, 0, spec.num_layers) if layer in number)
        shape = RouterShape(layers=spec.num_moe_layers, experts=spec.num_experts, top_k=spec.experts_per_token, own=own)
        at = positions_of_rank(lengths, layout, rank)
        # What a rank was sent is enough, and it may be no more than that.
        sent = [
            dataclasses.replace(s, experts=s.experts[rows][:, list(own)], rows_at=rows)  # type: ignore[index]
            for s, rows in ((s, at.rows_of(i)) for i, s in enumerate(given))
        ]
        batch, whole = (make_micro_batch(x, layout=layout, rank=rank, router=shape) for x in (sent, given))
        assert batch.rows is not None and whole.rows is not None and bool((batch.rows == whole.rows).all())
        held += batch.rows.numel()
        lost = next(i for i, s in enumerate(sent) if s.rows_at is not None and len(s.rows_at) > 1)
        short = dataclasses.replace(sent[lost], experts=sent[lost].experts[1:], rows_at=sent[lost].rows_at[1:])  # type: ignore[index]
        with pytest.raises(ReplayMismatch, match=rf"trajectory t{lost}, row \d+, MoE layers .*rank {rank}: .*not sent"):
            make_micro_batch([*sent[:lost], short, *sent[lost + 1 :]], layout=layout, rank=rank, router=shape)
    everything = sum(lengths) * spec.num_moe_layers * spec.experts_per_token
    assert everything <= held < 1.4 * everything
