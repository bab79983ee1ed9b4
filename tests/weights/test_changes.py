"""What a rank finds to have changed in its pieces: all of it, the same for any number of threads, and not too much."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.weights import sparse
from moe_asyncrl.weights.changes import Encoded, encode_changes
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.message import PREFIX_BYTES, open_message, seal
from moe_asyncrl.weights.pack import Parameters, piece_at_source
from moe_asyncrl.weights.plan_make import make_plan
from moe_asyncrl.weights.snapshot import Snapshot
from moe_asyncrl.weights.work import Work, rank_work
from tests.train.parity_jobs import tiny_spec
from tests.weights.plan_cases import numbered
from tests.weights.test_work import parameters

LAYOUT = Layout(dp=2, ep=2, pp=2)
HF = numbered(tiny_spec())


def base_of(work: Work, held: Parameters) -> Snapshot[int]:
    """What was sent at version 1."""
    snapshot: Snapshot[int] = Snapshot()
    snapshot.begin(1)
    for given in work.own:
        for piece in given.pieces:
            snapshot.store(piece.number, piece_at_source(work.origins[piece.number], held).float())
    snapshot.commit(1, "m")
    return snapshot


def encoded(
    share: float, *, threads: int, max_fraction: float = 0.5
) -> tuple[list[Encoded | None], dict[str, np.ndarray]]:
    """Of all ranks, where a share of the elements of half of the tensors has changed; and the new tensors."""
    rng = np.random.default_rng(5)
    plan = make_plan(tiny_spec(), LAYOUT, (EngineLayout(),), dtype="float32", bucket_bytes=20_000)
    new = {n: v + (rng.random(v.shape) < share) * 7 if i % 2 else v for i, (n, v) in enumerate(HF.items())}
    found = []
    for rank in range(LAYOUT.world_size):
        work = rank_work(plan, rank)
        snapshot = base_of(work, parameters(plan.spec, LAYOUT, rank, HF))
        found.append(
            encode_changes(
                work,
                parameters(plan.spec, LAYOUT, rank, new),
                snapshot,
                version=2,
                bucket_bytes=1 << 16,
                max_fraction=max_fraction,
                threads=threads,
            )
        )
    return found, new


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2])
def test_old_weights_and_the_changes_of_all_ranks_are_the_new_ones(share: float) -> None:
    found, new = encoded(share, threads=1)
    again, _ = encoded(share, threads=4)
    got = {name: value.astype(np.float32) for name, value in HF.items()}
    changed = 0
    for one, other in zip(found, again, strict=True):
        assert one is not None and other is not None and one.letters == other.letters
        assert (one.changed, one.elements) == (other.changed, other.elements)
        assert all(torch.equal(a, b) for a, b in zip(one.blobs, other.blobs, strict=True))
        changed += one.changed
        for letter, blob in zip(one.letters, one.blobs, strict=True):
            header = bytes(blob[PREFIX_BYTES : PREFIX_BYTES + letter.header_bytes].numpy())
            seal(blob, kind="sparse", epoch=1, version=2, stream=letter.stream, number=0, header=header)
            opened = open_message(blob, epoch=1, version=2, stream=letter.stream, number=0)
            for part in opened.parts:
                positions, values = sparse.decode(part, opened.payload)
                into = got[part.name][part.slices]
                flat = into.reshape(-1)
                flat[positions.numpy()] = values.view(torch.float32).numpy()
                into[...] = flat.reshape(into.shape)
    assert changed == sum(int((new[name] != HF[name]).sum()) for name in HF)
    assert all(np.array_equal(got[name], new[name].astype(np.float32)) for name in HF)


@pytest.mark.parametrize("threads", [1, 4])
def test_the_sum_of_all_pieces_decides_what_is_too_much(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_asyncrl.weights.changes.ROOM", 0)
    found, _ = encoded(0.2, threads=threads, max_fraction=0.3)
    assert all(one is not None for one in found)
    found, _ = encoded(0.2, threads=threads, max_fraction=0.05)
    assert found == [None] * LAYOUT.world_size
