"""Deltas: exact on bits for every item size, however dense, part by part and in bulk; broken blobs are named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.weights import sparse_encode
from moe_asyncrl.weights.message import message_bytes, open_message, payload_view, seal, sparse_header
from moe_asyncrl.weights.message_part import Part, place_parts, whole_part
from moe_asyncrl.weights.sparse import BLOCK, HEAD_BYTES, RAW, bits, decode, decode_all
from moe_asyncrl.weights.sparse_encode import Encoded, encode

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "float64")
RIGHT: dict[str, Any] = {"epoch": 1, "version": 2, "stream": 0, "number": 0}


def random_pair(dtype: str, elements: int, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Any bits at all, NaNs among them; about `share` of the second are others."""
    random, width = np.random.default_rng(seed), getattr(torch, dtype).itemsize
    kind = f"<u{width}"
    old = random.integers(0, 2 ** (8 * width), elements, dtype=kind, endpoint=False)
    new = np.where(random.random(elements) < share, random.integers(0, 2 ** (8 * width), elements, dtype=kind), old)
    return tuple(torch.from_numpy(np.array(a).view(np.uint8)).view(getattr(torch, dtype)) for a in (old, new))  # type: ignore[return-value]


def part_for(name: str, encoded: Encoded, dtype: str, shape: Sequence[int]) -> Part:
    assert encoded.blob is not None
    return msgspec.structs.replace(whole_part(name, dtype, shape), encoded_bytes=len(encoded.blob))


def applied(old: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    raw = old.clone().view(RAW[old.dtype.itemsize])
    raw[positions] = values
    return raw


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from((0, 1, 2, 255, 256, 257, 1000, 5000)),
    st.sampled_from((0.0, 0.001, 0.02, 0.5, 1.0)),
    st.integers(0, 10_000),
    st.sampled_from((BLOCK, 3 * BLOCK, 1 << 18)),
)
def test_old_and_changes_make_new_bit_for_bit(dtype: str, elements: int, share: float, seed: int, chunk: int) -> None:
    old, new = random_pair(dtype, elements, share, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_encode, "SPAN", chunk)
        encoded = encode(old, new, max_fraction=9.0 + HEAD_BYTES)
        copy = old.clone()
        if elements:
            assert encode(copy, new, max_fraction=9.0 + HEAD_BYTES, update=True).blob is not None
            assert np.array_equal(bits(copy), bits(new))
    differs = bits(old) != bits(new)
    assert (encoded.changed, encoded.elements) == (int(differs.sum()), elements)
    if encoded.blob is None:
        assert not elements
        return
    width = 2 if differs[: elements // BLOCK * BLOCK].reshape(-1, BLOCK).all(1).any() else 1
    size = HEAD_BYTES + encoded.changed * (old.dtype.itemsize + 1) + width * -(-elements // BLOCK)
    assert len(encoded.blob) == size
    positions, values = decode(part_for("w", encoded, dtype, (elements,)), encoded.blob)
    assert positions.dtype == torch.int64 and values.dtype == RAW[old.dtype.itemsize]
    assert positions.tolist() == np.flatnonzero(differs).tolist()
    assert np.array_equal(bits(applied(old, positions, values)), bits(new))


def test_bits_count_and_not_numbers() -> None:
    old = torch.tensor([0.0, 1.0, float("nan"), 2.0], dtype=torch.bfloat16)
    new = old.clone()
    new.view(torch.int16)[0] = -0x8000  # -0.0
    new.view(torch.int16)[2] += 1  # another NaN
    assert torch.equal(old[:1], new[:1])
    encoded = encode(old, new, max_fraction=100)
    positions, values = decode(part_for("w", encoded, "bfloat16", (4,)), encoded.blob)
    assert positions.tolist() == [0, 2] and values.equal(new.view(torch.int16)[[0, 2]])
    same = encode(new, new.clone(), max_fraction=100)
    assert (same.changed, same.fraction) == (0, 0.0) and same.blob is not None


@pytest.mark.parametrize("chunk", [BLOCK, 1 << 18])
def test_too_many_changes_are_given_up_and_the_copy_is_new_all_the_same(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_encode, "SPAN", chunk)
    old, new = random_pair("bfloat16", 10_000, 0.1, 1)
    whole = encode(old, new)
    assert whole.blob is not None and 0.05 < whole.fraction < 0.15
    share = len(whole.blob) / (2 * 10_000)
    assert encode(old, new, max_fraction=share + 0.0001).blob is not None
    for fraction in (share - 0.0001, share / 2, 0.0):
        copy = old.clone()
        given_up = encode(copy, new, max_fraction=fraction, update=True)
        assert given_up.blob is None and 0 < given_up.changed <= whole.changed
        assert np.array_equal(bits(copy), bits(new))
    with pytest.raises(ValueError, match=r"5 elements of torch\.float16 against a copy of 5 of torch\.bfloat16"):
        encode(old[:5], new[:5].half())
    with pytest.raises(ValueError, match="4 elements"):
        encode(old[:5], new[:4])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES), st.integers(1, 700), st.sampled_from((0.0, 0.01, 0.3, 1.0)), st.integers(0, 99)
        ),
        max_size=12,
    ),
    st.sampled_from((1, 100, 1 << 22)),
)
def test_a_message_of_many_parts_is_decoded_in_bulk(drawn: list[tuple[str, int, float, int]], at_once: int) -> None:
    """Through a sealed message; every part comes once, with what `decode` says of it alone."""
    pairs = [random_pair(*case) for case in drawn]
    encoded = [encode(old, new, max_fraction=9.0 + HEAD_BYTES) for old, new in pairs]
    parts = [
        part_for(f"w{i}", e, case[0], (1, case[1])) for i, (e, case) in enumerate(zip(encoded, drawn, strict=True))
    ]
    placed, payload = place_parts(parts)
    header = sparse_header(placed)
    buffer = torch.zeros(message_bytes(header, payload), dtype=torch.uint8)
    for part, e in zip(placed, encoded, strict=True):
        payload_view(buffer, header)[part.offset :][: part.encoded_bytes] = torch.from_numpy(e.blob)
    seal(buffer, kind="sparse", header=header, **RIGHT)
    opened = open_message(buffer, **RIGHT)
    assert opened.kind == "sparse"
    seen = []
    for changes in decode_all(opened.parts, opened.payload, at_once=at_once):
        for k, number in enumerate(changes.which.tolist()):
            seen.append(number)
            piece = slice(int(changes.starts[k]), int(changes.starts[k + 1]))
            positions, values = decode(opened.parts[number], opened.payload)
            assert changes.positions[piece].equal(positions) and changes.values[piece].equal(values)
            old, new = pairs[number]
            assert np.array_equal(bits(applied(old, positions, values)), bits(new))
    assert sorted(seen) == list(range(len(parts)))


def test_a_broken_blob_is_named() -> None:
    old, new = random_pair("bfloat16", 300, 0.1, 3)
    encoded = encode(old, new)
    assert encoded.blob is not None
    good, other = encoded.blob, part_for("good", encoded, "bfloat16", (300,))
    part = msgspec.structs.replace(other, name="bad", offset=512)
    blocks_at = HEAD_BYTES + 2 * encoded.changed

    def text(blob: Any, part: Part = part) -> str:
        payload = np.zeros(512 + len(blob), np.uint8)
        payload[: len(good)], payload[512:] = good, blob
        with pytest.raises(ValueError) as caught:
            list(decode_all([other, part], payload))
        return str(caught.value)

    def with_byte(at: int, value: int) -> Any:
        blob = good.copy()
        blob[at] = value
        return blob

    begin = "the changes of bad cannot be read: the blob "
    assert text(good[:-1]) == begin + "lies outside of the payload"
    short = msgspec.structs.replace(part, encoded_bytes=len(good) - 1)
    assert text(good[:-1], short) == begin + "has another length than its head says"
    assert text(with_byte(0, encoded.changed + 1)) == begin + "has another length than its head says"
    assert text(with_byte(7, 255)) == begin + "has more changes than the part has elements"
    assert text(with_byte(8, 4)) == begin + "is of another item size"
    assert text(with_byte(10, 3)) == begin + "has a head that makes no sense"
    assert text(with_byte(12, 1)) == begin + "has a head that makes no sense"
    assert text(with_byte(blocks_at, good[blocks_at] + 1)) == begin + "counts its changes wrongly"
    assert text(with_byte(len(good) - 1, 255)) == begin + "has positions behind the end of the part"
