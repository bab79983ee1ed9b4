"""Messages of weight updates: round trips, every flipped bit, whatever is not the message that was expected."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.weights.message import (
    PREFIX_BYTES,
    BadMessage,
    dense_header,
    host_bytes,
    message_bytes,
    open_message,
    payload_start,
    payload_view,
    seal,
    sparse_header,
)
from moe_asyncrl.weights.message_device import open_on_device, seal_on_device
from moe_asyncrl.weights.message_part import Part, part_view, place_parts, whole_part
from moe_asyncrl.weights.stream_digest import StreamDigest, manifest_digest

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "uint8", "float64", "int32")
RIGHT: dict[str, Any] = {"epoch": 3, "version": 7, "stream": 5, "number": 2}


@st.composite
def axes(draw: st.DrawFn) -> tuple[int, tuple[int, int, int]]:
    size = draw(st.integers(1, 9))
    start = draw(st.integers(0, size - 1))
    return size, (start, draw(st.integers(start + 1, size)), draw(st.integers(1, 3)))


@st.composite
def parts(draw: st.DrawFn) -> Part:
    drawn = draw(st.lists(axes(), max_size=3))
    name = draw(st.text(min_size=1, max_size=20))
    return Part(name, draw(st.sampled_from(DTYPES)), tuple(s for s, _ in drawn), tuple(r for _, r in drawn), 0)


def random_bytes(n: int, seed: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(n) or b"\0"), dtype=torch.uint8)[:n]


def bits(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def sealed(parts: list[Part], seed: int = 0, **changed: Any) -> torch.Tensor:
    placed, payload = place_parts(parts)
    header = dense_header(placed)
    buffer = torch.empty(message_bytes(header, payload), dtype=torch.uint8)
    payload_view(buffer, header).copy_(random_bytes(payload, seed))
    seal(buffer, kind="dense", header=header, **{**RIGHT, **changed})
    return buffer


@settings(max_examples=150, deadline=None)
@given(st.lists(parts(), max_size=6), st.integers(0, 1000))
def test_what_is_sealed_is_what_is_opened(drawn: list[Part], seed: int) -> None:
    """Every part is what indexing the HF tensor with its slices gives, bit for bit, in any dtype and with steps."""
    placed, payload = place_parts(drawn)
    tensors = [
        random_bytes(int(np.prod(p.shape)) * p.itemsize, seed + i).view(getattr(torch, p.dtype)).view(p.shape)
        for i, p in enumerate(placed)
    ]
    header = dense_header(placed)
    buffer = torch.zeros(message_bytes(header, payload), dtype=torch.uint8)
    view = payload_view(buffer, header)
    for part, tensor in zip(placed, tensors, strict=True):
        part_view(part, view).copy_(tensor[part.slices])
    digest = seal(buffer, kind="dense", header=header, **RIGHT)
    opened = open_message(buffer, **RIGHT)
    assert (opened.kind, opened.parts, opened.digest) == ("dense", placed, digest)
    assert opened.payload.data_ptr() == view.data_ptr() and len(opened.payload) == payload
    for part, tensor in zip(opened.parts, tensors, strict=True):
        assert part.offset % 64 == 0
        got, right = part_view(part, opened.payload), tensor[part.slices]
        assert got.dtype == right.dtype and got.shape == right.shape == part.counts
        assert bits(got) == bits(right)


def test_every_flipped_bit_is_caught() -> None:
    buffer = sealed([whole_part("model.norm.weight", "bfloat16", (7,)), whole_part("b", "float32", (2, 3))])
    open_message(buffer, **RIGHT)
    flat = buffer.numpy()
    for bit in range(8 * len(flat)):
        flat[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadMessage, match="trainer rank 5"):
            open_message(buffer, **RIGHT)
        flat[bit // 8] ^= 1 << bit % 8
    open_message(buffer, **RIGHT)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_bytes_that_are_no_message_are_refused(noise: bytes, after_a_prefix: bool) -> None:
    data = bytes(sealed([whole_part("a", "uint8", (3,))]).numpy()[:PREFIX_BYTES]) + noise if after_a_prefix else noise
    with pytest.raises(BadMessage):
        open_message(data, **RIGHT)


def test_the_text_names_sender_number_first_tensor_and_what_differs() -> None:
    buffer = sealed([whole_part("model.embed_tokens.weight", "bfloat16", (4, 4)), whole_part("b", "uint8", (9,))])
    for name, other in {"epoch": 2, "version": 8, "stream": 6, "number": 1}.items():
        with pytest.raises(BadMessage) as caught:
            open_message(buffer, **{**RIGHT, name: other}, sender=41)
        text = str(caught.value)
        assert f"it has {name} {RIGHT[name]} in place of {other} (first tensor model.embed_tokens.weight)" in text
        assert "trainer rank 41" in text and f"message {1 if name == 'number' else 2} of" in text
    buffer[-1] ^= 1
    with pytest.raises(BadMessage) as caught:
        open_message(buffer, **RIGHT)
    assert str(caught.value) == (
        "message 2 of version 7 from trainer rank 5 is damaged on its way: its digest does not fit its bytes "
        "(first tensor model.embed_tokens.weight)"
    )


def test_cut_short_too_long_and_of_another_release() -> None:
    buffer = sealed([whole_part("a", "uint8", (100,))])
    with pytest.raises(BadMessage, match="fewer than its prefix"):
        open_message(buffer[:63], **RIGHT)
    for wrong in (buffer[:-1], torch.cat([buffer, buffer[:1]])):
        with pytest.raises(BadMessage, match=f"says it has {len(buffer)} bytes and has {len(wrong)}"):
            open_message(wrong, **RIGHT)
    buffer[8] += 1
    with pytest.raises(BadMessage, match="schema 2, this process reads 1"):
        open_message(buffer, **RIGHT)


def test_a_sealed_message_whose_parts_make_no_sense_is_refused() -> None:
    """The digest fits, as the sender itself is wrong."""
    good = whole_part("w", "bfloat16", (4, 6))
    wrong = {
        "inside of an axis of 6": Part("w", "bfloat16", (4, 6), ((0, 4, 1), (0, 7, 1)), 0),
        "range 0:4:0": Part("w", "bfloat16", (4, 6), ((0, 4, 0), (0, 6, 1)), 0),
        "2 axes and 1 ranges": Part("w", "bfloat16", (4, 6), ((0, 4, 1),), 0),
        "not a multiple of 2": Part("w", "bfloat16", (4, 6), good.ranges, 1),
        "ends at byte 112 of a payload of 48": Part("w", "bfloat16", (4, 6), good.ranges, 64),
        "'bfloat61'": Part("w", "bfloat61", (4, 6), good.ranges, 0),
        "12 encoded bytes in a dense message": Part("w", "bfloat16", (4, 6), good.ranges, 0, 12),
    }
    for text, part in wrong.items():
        header = msgspec.msgpack.encode([part])
        buffer = torch.zeros(message_bytes(header, 48), dtype=torch.uint8)
        seal(buffer, kind="dense", header=header, **RIGHT)
        with pytest.raises(BadMessage, match="trainer rank 5 has a header that makes no sense") as caught:
            open_message(buffer, **RIGHT)
        assert text in str(caught.value) and "first tensor w" in str(caught.value)
        if "payload" not in text:
            with pytest.raises(ValueError, match="w"):
                dense_header([part])
    with pytest.raises(ValueError, match="b begins at byte 0, where the part before it ends at 48"):
        dense_header([good, whole_part("b", "uint8", (3,))])
    with pytest.raises(ValueError, match="w has 0 encoded bytes in a sparse message"):
        sparse_header([good])


def test_sizes_are_known_before_and_buffers_of_any_kind_are_the_same_bytes() -> None:
    placed, payload = place_parts([whole_part("a", "float32", (5,)), whole_part("b", "bfloat16", (2, 2))])
    assert payload == 64 + 8
    header = dense_header(placed)
    size = message_bytes(header, payload)
    assert payload_start(header) % 64 == 0 and size == payload_start(header) + payload
    buffers: list[Any] = [torch.zeros(size, dtype=torch.uint8), np.zeros(size, np.uint8), bytearray(size)]
    seen = set()
    for buffer in buffers:
        host_bytes(payload_view(buffer, header))[:] = bytes(range(payload))
        seal(buffer, kind="dense", header=header, **RIGHT)
        opened = open_message(buffer, **RIGHT)
        assert bytes(opened.payload) == bytes(range(payload))
        seen.add(bytes(buffer.numpy() if isinstance(buffer, torch.Tensor) else buffer))
        assert type(opened.payload) is (memoryview if isinstance(buffer, bytearray) else type(buffer))
    assert len(seen) == 1


def test_buffers_that_would_need_a_copy_are_refused() -> None:
    buffer = sealed([whole_part("a", "uint8", (64,))])
    with pytest.raises(ValueError, match="message_device"):
        open_message(torch.stack([buffer, buffer], 1)[:, 0], **RIGHT)
    with pytest.raises(ValueError, match="message_device"):
        open_message(buffer.to("meta"), **RIGHT)
    with pytest.raises(ValueError, match="no room"):
        seal(buffer[:70], kind="dense", header=dense_header([whole_part("a", "uint8", (6,))]), **RIGHT)


def test_a_message_in_device_memory_is_sealed_and_opened_over_a_host_copy() -> None:
    parts = [whole_part("a", "float32", (50,))]
    right, (placed, payload) = sealed(parts, seed=4), place_parts(parts)
    header = dense_header(placed)
    buffer, host = torch.zeros_like(right), torch.full((len(right) + 9,), 255, dtype=torch.uint8)
    payload_view(buffer, header).copy_(random_bytes(payload, 4))
    digest = seal_on_device(buffer, host, kind="dense", header=header, **RIGHT)
    assert buffer.equal(right) and host[: len(right)].equal(right)
    host.zero_()
    opened = open_on_device(buffer, host, **RIGHT)
    assert opened.digest == digest and opened.payload.data_ptr() == payload_view(buffer, header).data_ptr()
    buffer[-1] ^= 4
    with pytest.raises(BadMessage, match="digest"):
        open_on_device(buffer, host, **RIGHT)
    with pytest.raises(ValueError, match="room for 3 bytes"):
        open_on_device(buffer, host[:3], **RIGHT)


def test_the_digest_of_a_stream_tells_messages_and_their_order() -> None:
    digests = [seal(sealed([whole_part("a", "uint8", (8,))]), kind="dense", header=b"", **RIGHT | {"number": n})
               for n in range(4)]  # fmt: skip

    def over(order: tuple[int, ...]) -> str:
        chain = StreamDigest()
        for n in order:
            chain.add(digests[n])
        assert chain.count == len(order)
        return chain.value

    orders = [(), (0,), (0, 1), (1, 0), (0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 2), (0, 1, 2, 2)]
    values = [over(order) for order in orders]
    assert len(set(values)) == len(values) and over((0, 1, 2)) == values[6]
    manifest = manifest_digest({0: values[1], 9: values[2]})
    assert manifest == manifest_digest({9: values[2], 0: values[1]}) and len(manifest) == 32
    others = [{0: values[2], 9: values[1]}, {0: values[1], 8: values[2]}, {0: values[1]}, {}]
    assert len({manifest, *(manifest_digest(other) for other in others)}) == 5
    with pytest.raises(ValueError, match="16 bytes, not 3"):
        StreamDigest().add(b"abc")
