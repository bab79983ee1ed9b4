"""The plan of an update on metadata: everything covered, nothing twice, fused tensors together."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.weights.buckets import Bucket, check_buckets, plan_buckets, total_bytes
from tests.train.parity_jobs import tiny_spec

LAYOUTS = [
    Layout(),
    Layout(ep=2, dp=2),
    Layout(pp=2),
    Layout(ep=2, pp=2, dp=2),
    Layout(tp=2, etp=2),
    Layout(pp=2, vpp=2),
]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 1 << 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layout=st.sampled_from(LAYOUTS),
    tied=st.booleans(),
)
def test_every_tensor_once_whatever_the_bucket_size(size: int, dtype: torch.dtype, layout: Layout, tied: bool) -> None:
    """Also where a fused parameter is larger than the bucket: it then has one of its own."""
    spec = tiny_spec(tie_embeddings=tied)
    buckets = plan_buckets(spec, layout, dtype, size)
    model = parameter_map(spec)
    assert [t.name for b in buckets for t in b.tensors] == [t.name for t in model.hf_tensors()]
    assert total_bytes(buckets) == sum(t.numel for t in model.hf_tensors()) * dtype.itemsize
    units = {frozenset(t.name for t in entry.hf) for entry in model.entries}
    for bucket in buckets:
        assert bucket.nbytes <= size or frozenset(t.name for t in bucket.tensors) in units
    assert buckets == plan_buckets(spec, Layout(), dtype, size), "the plan must not depend on the trainer's layout"


def _drop(buckets: list[Bucket]) -> None:
    buckets.pop()


def _repeat(buckets: list[Bucket]) -> None:
    buckets.append(buckets[0])


def _reshape(buckets: list[Bucket]) -> None:
    first, *rest = buckets[0].tensors
    turned = msgspec.structs.replace(first, shape=first.shape[::-1])
    buckets[0] = dataclasses.replace(buckets[0], tensors=(turned, *rest))


def _part(buckets: list[Bucket]) -> None:
    """Gate in one bucket, up in the next."""
    for number, bucket in enumerate(buckets):
        for at, tensor in enumerate(bucket.tensors):
            if tensor.name.endswith("gate_proj.weight"):
                cut = at + 1
                size = sum(torch.Size(t.shape).numel() * 4 for t in bucket.tensors[:cut])
                halves = [Bucket(bucket.tensors[:cut], size), Bucket(bucket.tensors[cut:], bucket.nbytes - size)]
                buckets[number : number + 1] = halves
                return


@pytest.mark.parametrize(
    ("fault", "message"),
    [(_drop, "is missing"), (_repeat, "2 times"), (_reshape, "has shape"), (_part, "fused by engines")],
)
def test_a_wrong_plan_is_refused(fault: object, message: str) -> None:
    """Each kind of error in a plan is told."""
    spec = tiny_spec()
    buckets = list(plan_buckets(spec, Layout(), torch.float32, 1 << 16))
    fault(buckets)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        check_buckets(buckets, parameter_map(spec))


def test_an_offset_that_does_not_fit_the_item_is_refused() -> None:
    """A float32 tensor behind an odd number of bfloat16 elements."""
    spec = tiny_spec(vocab_size=261, hidden_size=63, num_attention_heads=3, num_kv_heads=1, head_dim=16)
    buckets = list(plan_buckets(spec, Layout(), torch.bfloat16, 1 << 30))
    first, second, *rest = buckets[0].tensors
    mixed = (first, msgspec.structs.replace(second, dtype="float32"), *rest)
    buckets[0] = dataclasses.replace(buckets[0], tensors=mixed)
    with pytest.raises(ValueError, match="not a multiple of 4"):
        check_buckets(buckets, parameter_map(spec))
