"""Buckets and messages on every layout: each tensor once, in order, bounded, put together from the owners' parts."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.gather import pack, place
from moe_asyncrl.weights.gather_plan import plan_gather
from tests.models.strategies import DENSE, MOE, specs_and_layouts
from tests.models.test_shards import local_parameters, numbered


@settings(max_examples=60, deadline=None)
@given(specs_and_layouts(), st.sampled_from([1, 40, 300, 10**9]))
def test_messages_fill_the_buckets_exactly(case: tuple[ModelSpec, Layout], max_elements: int) -> None:
    spec, layout = case
    hf = numbered(spec)
    ranks = local_parameters(spec, layout, hf)
    seen = []
    for bucket in plan_gather(spec, layout, max_elements):
        flat = torch.zeros(bucket.numel, dtype=torch.int64)
        for message in bucket.messages:
            payload = torch.zeros(message.numel, dtype=torch.int64)
            pack(message, ranks[message.owner], payload)
            if message.start is None:
                place(message, payload, flat)
            else:
                target = flat[message.start : message.start + message.numel]
                assert not bool(target.any())
                target.copy_(payload)
        assert sum(message.numel for message in bucket.messages) == bucket.numel
        start = 0
        for tensor in bucket.tensors:
            assert torch.equal(flat[start : start + tensor.numel].view(tensor.shape), hf[tensor.name])
            start += tensor.numel
            seen.append(tensor.name)
    assert seen == [tensor.name for tensor in parameter_map(spec).hf_tensors()]


@settings(max_examples=60, deadline=None)
@given(specs_and_layouts(), st.integers(1, 400))
def test_buckets_are_bounded_and_keep_fused_tensors_together(case: tuple[ModelSpec, Layout], limit: int) -> None:
    spec, layout = case
    plan = plan_gather(spec, layout, limit)
    bucket_of = {tensor.name: number for number, bucket in enumerate(plan) for tensor in bucket.tensors}
    for entry in parameter_map(spec).entries:
        assert len({bucket_of[tensor.name] for tensor in entry.hf}) == 1
    for name, number in bucket_of.items():
        # SGLang makes one parameter of the two, in one call.
        assert number == bucket_of[name.replace("q_a_proj", "kv_a_proj_with_mqa")]
    for bucket in plan:
        names = [t.name for t in bucket.tensors]
        alone = any({t.name for t in entry.hf} == set(names) for entry in parameter_map(spec).entries)
        pair = "q_a_proj" in names[0] and "kv_a_proj_with_mqa" in names[-1]
        assert bucket.numel <= limit or alone or pair


@settings(max_examples=40, deadline=None)
@given(specs_and_layouts(families=tuple(f for f in (*DENSE, *MOE) if f != "gpt_oss")))
def test_without_tensor_parallelism_everything_is_received_in_place(case: tuple[ModelSpec, Layout]) -> None:
    """Adjacent elements of one owner make one message: the number of messages does not grow with that of tensors.

    Not in gpt-oss, where every second row is another parameter's.
    """
    spec, layout = case
    if layout.tp > 1 or layout.etp > 1:
        return
    for bucket in plan_gather(spec, layout, 10**9):
        assert all(message.start is not None for message in bucket.messages)
        for first, second in pairwise(bucket.messages):
            assert first.owner != second.owner
