"""The sender's copy: deltas against what the engines committed, and none against anything else."""

from __future__ import annotations

import pytest
import torch

from moe_asyncrl.data.weights import Base
from moe_asyncrl.weights.message_part import Part
from moe_asyncrl.weights.snapshot import Snapshot
from moe_asyncrl.weights.sparse import decode
from moe_asyncrl.weights.sparse_encode import Encoded


def tensors(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {k: (torch.randn(n, generator=g) * scale).bfloat16() for k, n in {"a": 700, "b": 2000, "c": 1}.items()}


def stepped(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {k: torch.where(torch.rand(len(w), generator=g) < 0.05, w + 1, w) for k, w in weights.items()}


def committed(weights: dict[str, torch.Tensor], version: int = 1) -> Snapshot[str]:
    snapshot: Snapshot[str] = Snapshot()
    assert snapshot.begin(version) is None
    for key, w in weights.items():
        snapshot.store(key, w)
    snapshot.commit(version, f"m{version}")
    return snapshot


def changed(snapshot: Snapshot[str], key: str, new: torch.Tensor, *, max_fraction: float = 1.0) -> Encoded:
    encoding = snapshot.compare(key, new)
    return encoding.take(encoding.look(), int(max_fraction * new.nbytes))


def test_an_engine_that_applies_every_delta_holds_the_same_bits() -> None:
    weights = tensors(0)
    engine = {k: w.clone() for k, w in weights.items()}
    snapshot = committed(weights)
    assert snapshot.nbytes == 2 * (700 + 2000 + 1)
    for version in (2, 3, 4):
        weights = stepped(weights, version)
        assert snapshot.begin(version) == Base(version=version - 1, manifest=f"m{version - 1}")
        for key, new in weights.items():
            encoded = changed(snapshot, key, new, max_fraction=100)
            assert encoded.blob is not None and encoded.changed == int((engine[key] != new).sum())
            n = len(new)
            part = Part(key, "bfloat16", (n,), ((0, n, 1),), 0, len(encoded.blob))
            positions, values = decode(part, encoded.blob)
            engine[key].view(torch.int16)[positions] = values
        snapshot.commit(version, f"m{version}")
        assert all(engine[k].view(torch.int16).equal(w.view(torch.int16)) for k, w in weights.items())


def test_what_is_kept_is_a_copy_and_any_shape_is_one_row_after_the_other() -> None:
    new = tensors(0)["b"].view(40, 50)
    snapshot = committed({"b": new.clone()})
    later = new.clone()
    new.zero_()
    later[3, 7] += 1
    snapshot.begin(2)
    encoded = changed(snapshot, "b", later)
    assert encoded.changed == 1
    positions, _ = decode(Part("b", "bfloat16", (40, 50), ((0, 40, 1), (0, 50, 1)), 0, len(encoded.blob)), encoded.blob)
    assert positions.tolist() == [3 * 50 + 7]


def test_an_update_that_is_given_up_leaves_no_base() -> None:
    weights = tensors(0)
    snapshot = committed(weights)
    snapshot.begin(2)
    changed(snapshot, "a", weights["a"])
    assert snapshot.base is None
    assert snapshot.begin(3) is None
    with pytest.raises(ValueError, match="no copy of a that the engines hold: it has to be sent whole"):
        changed(snapshot, "a", weights["a"])
    for key, w in weights.items():
        snapshot.store(key, w)
    with pytest.raises(ValueError, match="version 2 cannot be committed: the copy holds what version 3 sends"):
        snapshot.commit(2, "m")
    snapshot.commit(3, "m3")
    assert snapshot.base == Base(version=3, manifest="m3")


def test_too_many_changes_are_sent_whole_and_the_copy_is_right_for_the_next_delta() -> None:
    weights, others = tensors(0), tensors(1)
    snapshot = committed(weights)
    snapshot.begin(2)
    for key, new in others.items():
        assert changed(snapshot, key, new, max_fraction=0.5).blob is None
    snapshot.store("a", others["a"])  # sent whole, once more
    snapshot.commit(2, "m2")
    snapshot.begin(3)
    assert [changed(snapshot, k, w, max_fraction=100).changed for k, w in others.items()] == [0, 0, 0]


def test_a_piece_without_a_turn_and_calls_out_of_turn() -> None:
    weights = tensors(0)
    snapshot = committed(weights)
    with pytest.raises(ValueError, match="no update has begun"):
        snapshot.store("a", weights["a"])
    with pytest.raises(ValueError, match="no update has begun"):
        changed(snapshot, "a", weights["a"])
    snapshot.begin(2)
    changed(snapshot, "a", weights["a"])
    with pytest.raises(ValueError, match="a comes twice in the update to version 2"):
        changed(snapshot, "a", weights["a"])
    with pytest.raises(ValueError, match="no copy of z"):
        changed(snapshot, "z", weights["a"])
    changed(snapshot, "b", weights["b"])
    with pytest.raises(ValueError, match="version 2 cannot be committed: 1 pieces had no turn, as c"):
        snapshot.commit(2, "m2")
    snapshot.forget()
    assert (snapshot.nbytes, snapshot.base, snapshot.begin(4)) == (0, None, None)
