"""What travels in an update, bucket by bucket, known before a byte moves. Pure arithmetic on metadata.

A bucket is the flat buffer that the gather yields: whole HF tensors of one dtype, back to back, so that each offset is
a multiple of the item size. Tensors that engines fuse when they load (q, k, v; gate and up) lie in one bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from moe_asyncrl.data.protocols import TensorMeta
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import ParameterMap, parameter_map
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.gather_plan import plan_gather


@dataclass(frozen=True, slots=True)
class Bucket:
    """One broadcast."""

    tensors: tuple[TensorMeta, ...]
    """In the order of the buffer."""
    nbytes: int

    @property
    def names(self) -> str:
        """For messages: the first and the last tensor."""
        first, last = self.tensors[0].name, self.tensors[-1].name
        return first if first == last else f"{first} … {last}"


def plan_buckets(spec: ModelSpec, layout: Layout, dtype: torch.dtype, max_bytes: int) -> tuple[Bucket, ...]:
    """The buckets of a full update, the same on every rank and in every process.

    At most `max_bytes` each; a Megatron parameter that is larger travels alone in a larger bucket.

    Raises:
        UserError: the layout does not fit the model.
        ValueError: the plan misses a tensor, has one twice, or parts what is fused (`check_buckets`).
    """
    label = str(dtype).removeprefix("torch.")
    plan = plan_gather(spec, layout, max(1, max_bytes // dtype.itemsize))
    buckets = tuple(
        Bucket(
            tuple(TensorMeta(name=t.name, dtype=bucket.dtype or label, shape=t.shape) for t in bucket.tensors),
            bucket.numel * getattr(torch, bucket.dtype or label).itemsize,
        )
        for bucket in plan
    )
    check_buckets(buckets, parameter_map(spec))
    return buckets


def check_buckets(buckets: Sequence[Bucket], model: ParameterMap) -> None:
    """Raises ValueError unless the buckets hold every tensor of the model once, with its shape, fused ones together."""
    counts = Counter(t.name for bucket in buckets for t in bucket.tensors)
    shapes = {tensor.name: tensor.shape for tensor in model.hf_tensors()}
    wrong = [f"{name} is missing" for name in shapes if not counts[name]]
    wrong += [f"{name} is there {n} times" for name, n in counts.items() if n > 1]
    wrong += [f"{name} is not of the model" for name in counts if name not in shapes]
    place = {}
    for number, bucket in enumerate(buckets):
        size = 0
        for tensor in bucket.tensors:
            place[tensor.name] = number
            item = getattr(torch, tensor.dtype).itemsize
            if size % item:
                wrong.append(f"{tensor.name} starts at byte {size}, not a multiple of {item}")
            if tensor.name in shapes and tensor.shape != shapes[tensor.name]:
                wrong.append(f"{tensor.name} has shape {list(tensor.shape)}, the model {list(shapes[tensor.name])}")
            size += item * _numel(tensor.shape)
        if size != bucket.nbytes:
            wrong.append(f"bucket {number} says {bucket.nbytes} bytes and holds {size}")
    for entry in model.entries:
        if len({place.get(tensor.name) for tensor in entry.hf}) > 1:
            wrong.append(f"{', '.join(t.name for t in entry.hf)} are fused by engines but not in one bucket")
    if wrong:
        raise ValueError("the plan of the weight update is wrong: " + "; ".join(wrong[:5]))


def total_bytes(buckets: Iterable[Bucket]) -> int:
    """Bytes of one update."""
    return sum(bucket.nbytes for bucket in buckets)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
