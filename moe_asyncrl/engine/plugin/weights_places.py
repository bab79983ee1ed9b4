"""Where elements of an HF tensor lie in a parameter of the engine, and how messages are written there.

A place says: the rectangle [low, high) of an HF tensor is, element by element, the strided view of the parameter's
storage that begins at `offset`. Nothing here knows SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from moe_asyncrl.weights.message_part import Part

Params = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Region:
    """A strided view of a parameter's storage, in elements."""

    param: str
    offset: int
    """From the start of the storage."""
    size: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, params: Params) -> torch.Tensor:
        """The elements themselves."""
        return params[self.param].as_strided(self.size, self.strides, self.offset)


@dataclass(frozen=True, slots=True)
class Place:
    """One rectangle of an HF tensor. Axes are the HF tensor's."""

    name: str
    """Of the HF tensor."""
    shape: tuple[int, ...]
    """Of the whole HF tensor."""
    low: tuple[int, ...]
    high: tuple[int, ...]
    param: str
    offset: int
    strides: tuple[int, ...]
    """In the parameter's storage, for a step along each axis; 0 along an axis of one element."""

    @property
    def region(self) -> Region:
        """All of it in the parameter."""
        size = tuple(h - n for n, h in zip(self.low, self.high, strict=True))
        return Region(self.param, self.offset, size, self.strides)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rectangle of the whole HF tensor."""
        return tensor[tuple(slice(n, h) for n, h in zip(self.low, self.high, strict=True))]

    def meet(self, part: Part) -> tuple[tuple[slice, ...], Region] | None:
        """What a part and the place have in common: which of the part's elements, and where they go."""
        taken, size, strides, offset = [], [], [], self.offset
        for (start, stop, step), low, high, stride in zip(part.ranges, self.low, self.high, self.strides, strict=True):
            first = max(0, -(-(low - start) // step))
            last = min(len(range(start, stop, step)), -(-(high - start) // step))
            if first >= last:
                return None
            taken.append(slice(first, last))
            size.append(last - first)
            strides.append(stride * step)
            offset += (start + first * step - low) * stride
        return tuple(taken), Region(self.param, offset, tuple(size), tuple(strides))


def place_of(name: str, source: torch.Tensor, shape: tuple[int, ...], param: str, target: torch.Tensor) -> Place | None:
    """The place that a copy of `source`, a view of the contiguous HF tensor `name`, into `target` means.

    None if it is no rectangle, or if it is more than a copy of elements (another shape, a repeated element).
    """
    if source.shape != target.shape:
        return None
    hf_strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    low, high, strides = [], [], []
    for size, stride in zip(shape, hf_strides, strict=True):
        first = source.storage_offset() // stride % size if size else 0
        low.append(first)
        high.append(first + 1)
        strides.append(0)
    axis_of = {stride: axis for axis, stride in enumerate(hf_strides) if shape[axis] > 1}
    for size, stride, target_stride in zip(source.shape, source.stride(), target.stride(), strict=True):
        if size == 1:
            continue
        axis = axis_of.pop(stride, None)
        if axis is None or low[axis] + size > shape[axis] or target_stride == 0:
            return None
        high[axis] = low[axis] + size
        strides[axis] = target_stride
    return Place(name, shape, tuple(low), tuple(high), param, int(target.storage_offset()), tuple(strides))


def write_dense(
    params: Params, places: Sequence[Place], part: Part, values: torch.Tensor
) -> list[tuple[Place, torch.Tensor, torch.Tensor]]:
    """The copies, (place, target, source), that put a part (`values`: its view of the payload) into its places."""
    found = []
    for place in places:
        if (met := place.meet(part)) is not None:
            taken, region = met
            found.append((place, region.view(params), values[taken]))
    return found


def write_sparse(
    params: Params, places: Sequence[Place], part: Part, positions: torch.Tensor, values: torch.Tensor
) -> None:
    """Put changed elements into their places.

    Args:
        positions: int64 [n], flat in the part, row by row.
        values: [n] their bits, as `sparse.RAW` of the part's item size. On the parameters' device, as positions are.
    """
    dtype: torch.dtype = getattr(torch, part.dtype)
    for place in places:
        met = place.meet(part)
        if met is None:
            continue
        taken, region = met
        target = params[place.param]
        keep, index = _indices(part.counts, taken, region, positions)
        chosen = values if keep is None else values[keep]
        flat = target.as_strided((target.untyped_storage().nbytes() // target.element_size(),), (1,), 0)
        if dtype == target.dtype:
            # As integers: not every dtype can be indexed, and no conversion may touch a NaN.
            flat = flat.view(values.dtype)
        else:
            chosen = chosen.view(dtype).to(target.dtype)
        # Four times as fast as an assignment by index on a CPU; no position comes twice.
        flat.scatter_(0, index if keep is None else index[keep], chosen)


def _indices(
    counts: tuple[int, ...], taken: tuple[slice, ...], region: Region, positions: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(which positions lie in the place, or None for all; where each of them lies in the parameter's storage)."""
    row_major = tuple(math.prod(counts[axis + 1 :]) for axis in range(len(counts)))
    if region.size == counts and all(
        n == 1 or a == b for n, a, b in zip(counts, region.strides, row_major, strict=True)
    ):
        return None, positions + region.offset
    rest, keep = positions, None
    index = torch.full_like(positions, region.offset)
    for axis in range(len(counts) - 1, -1, -1):
        count = counts[axis]
        along = rest % count if axis else rest
        rest = rest.div(count, rounding_mode="floor") if axis else rest
        if (taken[axis].start, taken[axis].stop) != (0, count):
            inside = (along >= taken[axis].start) & (along < taken[axis].stop)
            keep = inside if keep is None else keep & inside
            along = along - taken[axis].start
        index += along * region.strides[axis]
    return keep, index


def missing(params: Params, written: Sequence[Region]) -> list[str]:
    """Names of the parameters with an element that no region covers.

    Takes a byte of host memory for each element of the largest parameter, and looks at one parameter at a time.
    """
    by_param: dict[str, list[Region]] = {}
    for region in written:
        by_param.setdefault(region.param, []).append(region)
    found = []
    for name, param in params.items():
        length = param.untyped_storage().nbytes() // max(param.element_size(), 1)
        seen = torch.zeros(length, dtype=torch.bool)
        for region in by_param.get(name, ()):
            seen.as_strided(region.size, region.strides, region.offset).fill_(True)
        if not bool(seen.as_strided(param.shape, param.stride(), param.storage_offset()).all()):
            found.append(name)
    return found
