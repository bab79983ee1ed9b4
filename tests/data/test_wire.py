"""A trajectory arrives as it was sent, or does not arrive at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.data.digest import row_digests
from moe_asyncrl.data.trajectory import SCHEMA, SamplingMask, Trajectory
from moe_asyncrl.data.validate import ContractViolation, validate
from moe_asyncrl.data.wire import FIELDS, FrameSpec, TrajectoryHeader, arrays_of, decode, decode_arrays, encode
from tests.data.samples import trajectories, trajectory


def travel(t: Trajectory) -> Trajectory:
    header, frames = encode(t)
    packed = msgspec.msgpack.encode(header)
    return decode(msgspec.msgpack.decode(packed, type=TrajectoryHeader), [bytes(f) for f in frames])


def same(a: Trajectory, b: Trajectory) -> None:
    left, right = arrays_of(a), arrays_of(b)
    assert left.keys() == right.keys()
    for field in left:
        assert left[field].dtype == right[field].dtype, field
        np.testing.assert_array_equal(left[field], right[field], err_msg=field)
    plain = {f.name for f in dataclasses.fields(Trajectory)} - {
        "tokens", "loss_mask", "logprobs", "weight_version", "support_logprobs", "routing_experts", "sampling_mask",
        "step_rewards", "teacher_logprobs", "teacher_topk",
    }  # fmt: skip
    for name in plain:
        assert getattr(a, name) == getattr(b, name), name


@settings(max_examples=80, deadline=None)
@given(trajectories())
def test_every_field_comes_back_as_it_was_sent(t: Trajectory) -> None:
    validate(t)
    back = travel(t)
    same(t, back)
    validate(back)


def test_the_strategy_reaches_every_wire_field() -> None:
    """So that a field added to the contract and forgotten in the tests is noticed."""
    seen: set[str] = set()

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(trajectories())
    def look(t: Trajectory) -> None:
        seen.update(arrays_of(t))

    look()
    assert seen == set(FIELDS)


def test_an_absent_field_stays_absent_and_is_not_filled_with_zeros() -> None:
    back = travel(trajectory(layers=0))
    assert back.routing_experts is None
    assert back.sampling_mask is None
    assert back.support_logprobs is None
    assert back.teacher_logprobs is None


@settings(max_examples=40, deadline=None)
@given(trajectories(), st.data())
def test_a_truncated_or_longer_frame_is_refused_by_name(t: Trajectory, data: st.DataObject) -> None:
    header, frames = encode(t)
    at = data.draw(st.integers(0, len(frames) - 1))
    whole = bytes(frames[at])
    wrong = whole[: data.draw(st.integers(0, len(whole) - 1))] if whole and data.draw(st.booleans()) else whole + b"\0"
    cut = [*frames[:at], wrong, *frames[at + 1 :]]
    with pytest.raises(ContractViolation, match=f"{header.frames[at].field}.*{len(wrong)} bytes"):
        decode(header, cut)


def test_a_missing_frame_is_refused() -> None:
    header, frames = encode(trajectory())
    with pytest.raises(ContractViolation, match="4 frames arrived, its header lists 5"):
        decode(header, frames[:-1])


@pytest.mark.parametrize("field", ["tokens", "loss_mask", "logprobs", "weight_version"])
def test_a_header_without_a_field_that_training_needs_is_refused(field: str) -> None:
    header, frames = encode(trajectory())
    keep = [i for i, s in enumerate(header.frames) if s.field != field]
    thin = msgspec.structs.replace(header, frames=tuple(header.frames[i] for i in keep))
    with pytest.raises(ContractViolation, match=f"frames missing: {field}"):
        decode(thin, [frames[i] for i in keep])


@pytest.mark.parametrize("dtype", ["<i8", ">i4", "<f4", "|O", "|V8", "int32"])
def test_an_element_type_that_the_contract_does_not_have_is_refused(dtype: str) -> None:
    header, frames = encode(trajectory())
    specs = tuple(FrameSpec(s.field, dtype, s.shape) if s.field == "tokens" else s for s in header.frames)
    with pytest.raises(ContractViolation, match="'tokens' of type"):
        decode(msgspec.structs.replace(header, frames=specs), frames)


@pytest.mark.parametrize("shape", [(-3,), (-1, -12), (0, 1 << 62), (0, 1 << 30, 1 << 30), (1, 1, 1, 12)])
def test_a_shape_that_no_array_has_is_refused(shape: tuple[int, ...]) -> None:
    header, frames = encode(trajectory())
    specs = (FrameSpec("tokens", "<i4", shape), *header.frames[1:])
    with pytest.raises(ContractViolation, match="has the shape"):
        decode(msgspec.structs.replace(header, frames=specs), frames)


@pytest.mark.parametrize(
    "field", ["sampled", "oldest_version", "newest_version", "other_version_rows", "other_version_sampled"]
)
def test_a_count_that_is_not_that_of_the_arrays_is_refused(field: str) -> None:
    """The trainer weighs tokens and picks trajectories by the header alone."""
    header, frames = encode(trajectory(version=3))
    wrong = getattr(header, field) + 1
    with pytest.raises(ContractViolation, match=f"trajectory 0.0.0: its header says {field} {wrong}"):
        decode(msgspec.structs.replace(header, **{field: wrong}), frames)


def test_a_length_or_runs_of_other_arrays_are_refused() -> None:
    header, frames = encode(trajectory(layers=0))
    with pytest.raises(ContractViolation, match=r"tokens \[12\] for 13 tokens"):
        decode(msgspec.structs.replace(header, length=13), frames)
    header, frames = encode(trajectory())
    with pytest.raises(ContractViolation, match=r"routing.runs do not cover rows 0 to 11 once"):
        decode(msgspec.structs.replace(header, routing_runs=()), frames)


def test_an_unknown_or_doubled_field_is_refused() -> None:
    header, frames = encode(trajectory())
    for name in ("shell", "tokens"):
        specs = (*header.frames, FrameSpec(name, "<i4", (12,)))
        with pytest.raises(ContractViolation, match=f"'{name}'.*not allowed"):
            decode(msgspec.structs.replace(header, frames=specs), [*frames, frames[0]])


@pytest.mark.parametrize("schema", [0, SCHEMA + 1])
def test_another_schema_is_refused_with_both_numbers(schema: int) -> None:
    header, frames = encode(trajectory())
    with pytest.raises(ContractViolation, match=f"schema {schema}, this build reads {SCHEMA}"):
        decode(msgspec.structs.replace(header, schema=schema), frames)


def swap_rows(t: Trajectory) -> Trajectory:
    e = np.array(t.routing_experts)
    e[[0, 1]] = e[[1, 0]]
    return dataclasses.replace(t, routing_experts=e)


def shift_rows(t: Trajectory) -> Trajectory:
    return dataclasses.replace(t, routing_experts=np.roll(np.asarray(t.routing_experts), 1, axis=0))


def shift_layers(t: Trajectory) -> Trajectory:
    return dataclasses.replace(t, routing_experts=np.roll(np.asarray(t.routing_experts), 1, axis=1))


def other_tokens(t: Trajectory) -> Trajectory:
    return dataclasses.replace(t, tokens=t.tokens[::-1].copy())


def other_type(t: Trajectory) -> Trajectory:
    return dataclasses.replace(t, routing_experts=np.asarray(t.routing_experts).astype(np.uint16))


@pytest.mark.parametrize("move", [swap_rows, shift_rows, shift_layers, other_tokens, other_type])
def test_rows_that_moved_are_caught_by_the_digest(move: Callable[[Trajectory], Trajectory]) -> None:
    t = trajectory(tokens=16, layers=3)
    header, _ = encode(t)
    moved_header, moved_frames = encode(move(t))
    with pytest.raises(ContractViolation, match="do not belong to these tokens"):
        decode(msgspec.structs.replace(moved_header, digest=header.digest), moved_frames)


def test_a_row_digest_binds_experts_token_row_and_layer() -> None:
    """Each alone: two rows may hold the same experts, and only what stands around them tells them apart."""
    experts = np.tile(np.arange(8, dtype=np.uint8).reshape(1, 2, 4), (4, 1, 1))
    tokens, rows = np.full(4, 7, dtype=np.int32), np.full(4, 3)
    plain = row_digests(experts, tokens, rows, first_layer=0)
    assert len(set(plain.tolist())) == 1
    assert len(set(row_digests(experts, tokens, np.arange(4), first_layer=0).tolist())) == 4
    assert len(set(row_digests(experts, np.arange(4, dtype=np.int32), rows, first_layer=0).tolist())) == 4
    assert row_digests(experts, tokens, rows, first_layer=1)[0] != plain[0]
    assert row_digests(experts[:, :, ::-1], tokens, rows, first_layer=0)[0] != plain[0]
    # Layers one by one or together: another block, another digest.
    assert row_digests(experts[:, :1], tokens, rows, first_layer=0)[0] != plain[0]


def test_rows_of_another_trajectory_are_caught_by_the_digest() -> None:
    a, b = trajectory(0), trajectory(1)
    header, frames = encode(a)
    at = [s.field for s in header.frames].index("routing.experts")
    with pytest.raises(ContractViolation, match=r"trajectory 0\.0\.0.*digest"):
        decode(header, [*frames[:at], encode(b)[1][at], *frames[at + 1 :]])


def test_a_moved_sampling_mask_is_caught_by_the_digest() -> None:
    t = trajectory(tokens=4)
    mask = SamplingMask(np.array([0, 0, 1, 2, 3], dtype=np.int64), np.array([5, 6, 7], dtype=np.int32))
    other = SamplingMask(mask.indptr, mask.ids[::-1].copy())
    header, frames = encode(dataclasses.replace(t, sampling_mask=mask))
    moved = encode(dataclasses.replace(t, sampling_mask=other))[1]
    with pytest.raises(ContractViolation, match="mask does not belong to these tokens"):
        decode(header, moved)
    with pytest.raises(ContractViolation, match="mask do not belong to these tokens"):
        decode(msgspec.structs.replace(header, mask_digest=encode(t)[0].mask_digest), frames)


def test_half_a_pair_of_frames_is_refused() -> None:
    """The ids of a sampling mask (or of a teacher) without their other half say nothing."""
    t = dataclasses.replace(
        trajectory(tokens=4), sampling_mask=SamplingMask(np.zeros(5, dtype=np.int64), np.zeros(0, dtype=np.int32))
    )
    header, frames = encode(t)
    for gone in ("sampling_mask.indptr", "sampling_mask.ids"):
        keep = [i for i, s in enumerate(header.frames) if s.field != gone]
        thin = msgspec.structs.replace(header, frames=tuple(header.frames[i] for i in keep))
        with pytest.raises(ContractViolation, match="sampling_mask"):
            decode(thin, [frames[i] for i in keep])


def test_arrays_that_arrive_cannot_be_written_to() -> None:
    header, frames = encode(trajectory())
    arrays = decode_arrays(header, [bytes(f) for f in frames])
    with pytest.raises(ValueError, match="read-only"):
        arrays["tokens"][0] = 1


def test_a_header_says_what_a_plan_needs_without_any_frame() -> None:
    t = trajectory(tokens=12, version=4)
    header, _ = encode(t)
    assert (header.length, header.sampled, header.oldest_version, header.newest_version) == (12, 6, 4, 4)
    assert sum(s.nbytes for s in header.frames) == sum(a.nbytes for a in arrays_of(t).values())
