"""Each rank is sent its own rows and layers, once, and can check them; what does not belong to its token is caught."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.data import messages as m
from moe_asyncrl.data.group_wire import decode_group, encode_group
from moe_asyncrl.data.row_slices import (
    RowSlice,
    blocks_of_layers,
    cut_array,
    cuts_of,
    digest_columns,
    ranges_of,
    slice_of,
    stored_rows,
)
from moe_asyncrl.data.trajectory import Trajectory
from moe_asyncrl.data.validate import ContractViolation
from moe_asyncrl.data.wire import Frame, TrajectoryHeader, check_root
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.rank_positions import positions_of_rank
from tests.buffer.harness import Ask, begun, service
from tests.data.samples import trajectory

L, K = 4, 8
BLOCKS = ((0, 2), (2, 4))


def sharing(common: int, lengths: list[int]) -> list[Trajectory]:
    """A group whose trajectories have `common` leading tokens and rows in common."""
    made = [trajectory(0, 0, i, tokens=n, layers=L, k=K) for i, n in enumerate(lengths)]
    first = made[0]
    assert first.routing_experts is not None
    out = [first]
    for t in made[1:]:
        tokens, rows = t.tokens.copy(), np.array(t.routing_experts)
        n = min(common, t.length, first.length)
        tokens[:n] = first.tokens[:n]
        rows[: min(n, t.length - 1, first.length - 1)] = first.routing_experts[: min(n, t.length - 1, first.length - 1)]
        out.append(dataclasses.replace(t, tokens=tokens, routing_experts=rows))
    return out


@dataclasses.dataclass
class Taken:
    """A batch in a buffer, and what a rank gets from it."""

    ask: Ask
    headers: tuple[TrajectoryHeader, ...]
    group: list[Trajectory]
    received: int = 0

    def rows(
        self, needs: dict[str, np.ndarray], layers: list[int], spoil: Any = lambda frames: frames
    ) -> dict[str, RowSlice]:
        by_name = {h.identity.trajectory: h for h in self.headers}
        blocks = blocks_of_layers(self.headers[0], layers)
        stored = stored_rows(by_name, needs)
        cuts = cuts_of(stored)
        reply = self.ask(m.FetchRows, step=1, blocks=blocks, cuts=tuple(cuts), digests=tuple(needs))
        assert isinstance(reply, m.Frames), reply
        frames: list[Frame] = spoil([bytes(f) for f in self.ask.frames])
        self.received = sum(len(f) for f in frames)
        arrays = {
            c.trajectory: cut_array(by_name[c.trajectory], f, len(stored[c.trajectory]), blocks)
            for c, f in zip(cuts, frames, strict=False)
        }
        found = {}
        for t, frame in zip(needs, frames[len(cuts) :], strict=True):
            tokens = next(x.tokens for x in self.group if x.identity.trajectory == t)
            check_root(by_name[t], tokens)
            columns = digest_columns(by_name[t], frame, blocks)
            found[t] = slice_of(
                by_name[t], needs[t], layers, blocks, stored=stored, arrays=arrays, tokens=tokens, columns=columns
            )
        return found


def taken(group: list[Trajectory], blocks: Any = BLOCKS) -> Taken:
    to = service()
    owner = begun(to)
    sampler = Ask(to, "rollout-0")
    granted = sampler(m.AskTickets, wanted=2, holding=()).tickets
    for ticket in granted:
        own = [
            dataclasses.replace(
                t,
                identity=msgspec.structs.replace(
                    t.identity, index=ticket.index, trajectory=f"{ticket.index}.0.{t.identity.sample}"
                ),
            )
            for t in group
        ]
        headers, frames = encode_group(own, blocks=blocks)
        assert sampler(m.PutGroup, frames, ticket=ticket, headers=headers, failed=0, epoch=ticket.epoch).held
    batch = owner(m.Take, step=1, version=0, groups=2)
    return Taken(owner, batch.groups[0].headers, group)


@settings(max_examples=30, deadline=None)
@given(
    common=st.integers(0, 12), lengths=st.lists(st.integers(2, 14), min_size=1, max_size=4), data=st.data(),
    blocks=st.sampled_from([(), BLOCKS, ((0, 1), (1, 3), (3, 4))]),
)  # fmt: skip
def test_any_rows_of_any_layers_arrive_as_they_were_sent(
    common: int, lengths: list[int], data: st.DataObject, blocks: Any
) -> None:
    group = sharing(common, lengths)
    batch = taken(group, blocks)
    layers = sorted(data.draw(st.sets(st.integers(0, L - 1), min_size=1)))
    needs = {
        t.identity.trajectory: np.array(sorted(data.draw(st.sets(st.integers(0, t.length - 2)))), dtype=np.int64)
        for t in group
    }
    found = batch.rows(needs, layers)
    for t in group:
        rows = needs[t.identity.trajectory]
        assert t.routing_experts is not None
        np.testing.assert_array_equal(
            found[t.identity.trajectory].experts, t.routing_experts[rows][:, layers], err_msg=t.identity.trajectory
        )


@settings(max_examples=30, deadline=None)
@given(common=st.integers(0, 12), lengths=st.lists(st.integers(2, 14), min_size=1, max_size=4))
def test_a_group_is_whole_again_and_its_common_rows_went_once(common: int, lengths: list[int]) -> None:
    group = sharing(common, lengths)
    headers, frames = encode_group(group, blocks=BLOCKS)
    back = decode_group(headers, [bytes(f) for f in frames])
    for t, b in zip(group, back, strict=True):
        np.testing.assert_array_equal(t.routing_experts, b.routing_experts)
        np.testing.assert_array_equal(t.tokens, b.tokens)
    sent = sum(s.nbytes for h in headers for s in h.frames if s.field == "routing.experts")
    first = group[0].length - 1
    own = first + sum(max(0, t.length - 1 - min(common, first, t.length - 1)) for t in group[1:])
    assert sent <= own * L * K


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        pytest.param(Layout(), 1.0, id="one"),
        pytest.param(Layout(pp=2), 0.5, id="pp2"),
        pytest.param(Layout(cp=2), 0.5, id="cp2"),
        pytest.param(Layout(tp=2), 0.5, id="tp2"),
        pytest.param(Layout(pp=2, cp=2, tp=2), 0.125, id="pp2cp2tp2"),
    ],
)
def test_a_rank_receives_only_its_own_slice(layout: Layout, part: float) -> None:
    """Fault 31, on the wire: bytes of rows at each rank, and all rows of all layers over the ranks together."""
    group = sharing(0, [65, 33])
    batch = taken(group)
    names = [t.identity.trajectory for t in group]
    whole = sum((t.length - 1) * L * K for t in group)
    seen = {name: np.zeros((t.length - 1, L), dtype=int) for name, t in zip(names, group, strict=True)}
    for rank in range(layout.world_size):
        at = positions_of_rank([t.length - 1 for t in group], layout, rank)
        layers = [
            layer for chunk in range(layout.chunks) for layer in layout.layers_of(layout.coordinates(rank).pp, chunk, L)
        ]
        needs = {name: np.sort(at.rows_of(i)) for i, name in enumerate(names)}
        found = batch.rows(needs, layers)
        digests = 4 * sum(t.length - 1 for t in group) * len(blocks_of_layers(batch.headers[0], layers))
        assert batch.received - digests == part * whole
        assert digests <= 0.3 * whole  # 8 experts of 2 layers; 1 % at 48 layers
        for name in names:
            seen[name][np.ix_(found[name].rows, layers)] += 1
    assert all((count == 1).all() for count in seen.values())


def test_shared_rows_come_to_a_rank_once() -> None:
    group = sharing(9, [12, 12, 12, 12])
    batch = taken(group)
    batch.rows({t.identity.trajectory: np.arange(11) for t in group}, [0, 1])
    assert batch.received == (11 + 3 * 2) * 2 * K + 4 * 11 * 4


@pytest.mark.parametrize(
    "what", ["row moved", "expert changed", "rows of another", "digests of another", "layer moved"]
)
def test_a_slice_that_does_not_belong_to_its_tokens_is_named(what: str) -> None:
    group = sharing(0, [12, 12])
    batch = taken(group)
    needs = {t.identity.trajectory: np.arange(3, 8) for t in group}

    def spoil(frames: list[bytes]) -> list[bytes]:
        first = np.frombuffer(frames[0], dtype="u1").reshape(5, 2, K).copy()
        if what == "row moved":
            first[[0, 1]] = first[[1, 0]]
        elif what == "expert changed":
            first[4, 1, 3] ^= 1
        elif what == "layer moved":
            first = first[:, ::-1].copy()
        elif what == "rows of another":
            return [frames[1], frames[0], *frames[2:]]
        else:
            return [*frames[:2], frames[3], frames[2]]
        return [first.tobytes(), *frames[1:]]

    row = {"expert changed": "7", "digests of another": r"\d+"}.get(what, "3")
    named = (
        r"trajectory 0\.0\.0: its routing rows of MoE layers 2 to 3"
        if what == "digests of another"
        else (rf"trajectory 0\.0\.0: routing row {row}, MoE layers 2 to 3")
    )
    with pytest.raises(ContractViolation, match=named):
        batch.rows(needs, [2, 3], spoil)


def test_what_is_not_there_is_refused() -> None:
    batch = taken(sharing(0, [12, 12]))
    for fields in (
        {"blocks": (2,), "cuts": (), "digests": ("0.0.0",)},
        {"blocks": (), "cuts": (), "digests": ("0.0.0",)},
        {"blocks": (0,), "cuts": (m.RowCut("0.0.0", ((5, 12),)),), "digests": ()},
        {"blocks": (0,), "cuts": (m.RowCut("0.0.0", ((5, 7), (6, 8))),), "digests": ()},
        {"blocks": (0,), "cuts": (m.RowCut("9.0.0", ((5, 7),)),), "digests": ()},
    ):
        assert isinstance(batch.ask(m.FetchRows, step=1, **fields), m.Refused)


def test_ranges() -> None:
    assert ranges_of(np.array([], dtype=np.int64)) == ()
    assert ranges_of(np.array([0, 1, 2, 5, 7, 8])) == ((0, 3), (5, 6), (7, 9))
