"""What a checkpoint holds, in whatever form: quantised weights and their scales are one tensor in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from moe_asyncrl.checkpoint.formats import fp8, mxfp4
from moe_asyncrl.checkpoint.formats.raw import DTYPES, PLAIN, RawFiles, StoredTensor, unknown_type
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.quantization import Quantization

_PLAIN_TYPES = frozenset(DTYPES[name] for name in PLAIN)


class View(Protocol):
    """One logical tensor."""

    @property
    def tensor(self) -> StoredTensor:
        """What it looks like to a reader."""
        ...

    def read(self, raw: RawFiles, slices: tuple[slice, ...] | None) -> torch.Tensor:
        """The rectangle, dequantised; nothing is read or computed beyond the blocks that it touches."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Stored as it is."""

    tensor: StoredTensor

    def read(self, raw: RawFiles, slices: tuple[slice, ...] | None) -> torch.Tensor:
        """See View."""
        return raw.read(self.tensor.name, slices)


@dataclass(frozen=True, slots=True)
class Fp8:
    """Codes under the plain name, scales beside them."""

    tensor: StoredTensor
    block: fp8.Block

    def read(self, raw: RawFiles, slices: tuple[slice, ...] | None) -> torch.Tensor:
        """See View. Raises UserError where a value is not finite."""
        name = self.tensor.name
        ranges = _ranges(self.tensor.shape, slices)
        runs = tuple(slice(r.start, r.stop) for r in ranges)
        touched = tuple(
            slice(run.start // size, -(-run.stop // size)) for run, size in zip(runs[-2:], self.block, strict=True)
        )
        codes = raw.read(name, runs)
        scales = raw.read(name + fp8.SCALE_SUFFIX, (*runs[:-2], *touched))
        value = fp8.dequantize(codes, scales, self.block, (runs[-2].start, runs[-1].start))
        check_finite(value, self.tensor, tuple(run.start for run in runs))
        return value[tuple(slice(None, None, r.step) for r in ranges)]


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Blocks and scales, with rows before inputs."""

    tensor: StoredTensor

    def read(self, raw: RawFiles, slices: tuple[slice, ...] | None) -> torch.Tensor:
        """See View. The result is a transposed view. Raises UserError where a value is not finite."""
        name = self.tensor.name
        experts, inputs, rows = _ranges(self.tensor.shape, slices)
        groups = slice(inputs.start // mxfp4.GROUP, -(-inputs.stop // mxfp4.GROUP))
        stored = (slice(experts.start, experts.stop, experts.step), slice(rows.start, rows.stop, rows.step), groups)
        value = mxfp4.dequantize(
            raw.read(name + mxfp4.BLOCKS_SUFFIX, (*stored, slice(0, mxfp4.GROUP // 2))),
            raw.read(name + mxfp4.SCALES_SUFFIX, stored),
        )
        skipped = groups.start * mxfp4.GROUP
        value = value[..., inputs.start - skipped : inputs.stop - skipped : inputs.step].transpose(1, 2)
        check_finite(
            value,
            self.tensor,
            (experts.start, inputs.start, rows.start),
            (experts.step, inputs.step, rows.step),
        )
        return value


def logical_views(
    stored: Mapping[str, StoredTensor], quantization: Quantization | None, directory: Path
) -> dict[str, View]:
    """The logical tensors by name, in the order of the files.

    Raises:
        UserError: quantised weights without scales, scales without weights or of another shape; a type that is neither
            a plain one nor part of a form; or `config.json` and files that disagree about the form.
    """
    views: dict[str, View] = {}
    taken: set[str] = set()
    for name, tensor in stored.items():
        if tensor.dtype == fp8.CODES:
            taken |= {name, name + fp8.SCALE_SUFFIX}
            views[name] = _fp8(tensor, stored, quantization)
        elif tensor.dtype == torch.uint8 and name.endswith(mxfp4.BLOCKS_SUFFIX):
            base = name.removesuffix(mxfp4.BLOCKS_SUFFIX)
            if base in stored:
                raise UserError(f"{directory}: {base} is there both plain and as MXFP4")
            taken |= {name, base + mxfp4.SCALES_SUFFIX}
            views[base] = _mxfp4(base, tensor, stored)
        elif tensor.dtype in _PLAIN_TYPES:
            views[name] = Plain(tensor)
    for name in taken & views.keys():
        if isinstance(views[name], Plain):
            del views[name]
    for name, tensor in stored.items():
        if name in taken:
            continue
        if tensor.dtype not in _PLAIN_TYPES:
            raise unknown_type(tensor.file, name, next(k for k, v in DTYPES.items() if v == tensor.dtype))
        if name.endswith(fp8.SCALE_SUFFIX):
            raise UserError(f"{tensor.file}: tensor {name} holds scales, but its weights are missing or are not FP8")
    _check_form(views, quantization, directory)
    return views


def check_finite(
    value: torch.Tensor, tensor: StoredTensor, start: tuple[int, ...], step: tuple[int, ...] | None = None
) -> None:
    """Raise UserError, naming the first place, if a dequantised value is NaN or infinite."""
    place = fp8.not_finite(value)
    if place is None:
        return
    at = [a + i * s for a, i, s in zip(start, place, step or [1] * len(start), strict=True)]
    raise UserError(
        f"{tensor.file}: tensor {tensor.name} is {float(value[place])} at {at} once dequantised: "
        "the file is damaged, or was written by another program than the model's own"
    )


def _fp8(tensor: StoredTensor, stored: Mapping[str, StoredTensor], quantization: Quantization | None) -> Fp8:
    if quantization is None or quantization.method != "fp8":
        raise UserError(
            f"{tensor.file}: tensor {tensor.name} is FP8, but config.json has no `quantization_config` that says how"
        )
    scales = stored.get(tensor.name + fp8.SCALE_SUFFIX)
    if scales is None:
        raise UserError(f"{tensor.file}: tensor {tensor.name} is FP8, but {tensor.name}{fp8.SCALE_SUFFIX} is missing")
    if len(tensor.shape) < 2:
        raise UserError(f"{tensor.file}: tensor {tensor.name} is FP8, but has no rows and columns to cut into blocks")
    expected = fp8.grid(tensor.shape, quantization.block)
    if scales.shape != expected or scales.dtype not in (torch.float32, torch.bfloat16):
        rows, columns = quantization.block
        raise UserError(
            f"{scales.file}: tensor {scales.name} is {str(scales.dtype).removeprefix('torch.')} {list(scales.shape)}; "
            f"blocks of {rows}x{columns} of {tensor.name} {list(tensor.shape)} need float32 or bfloat16 "
            f"{list(expected)}"
        )
    return Fp8(StoredTensor(tensor.name, tensor.shape, torch.bfloat16, tensor.file, "fp8"), quantization.block)


def _mxfp4(name: str, blocks: StoredTensor, stored: Mapping[str, StoredTensor]) -> Mxfp4:
    scales = stored.get(name + mxfp4.SCALES_SUFFIX)
    if len(blocks.shape) != 4 or blocks.shape[-1] != mxfp4.GROUP // 2:
        raise UserError(
            f"{blocks.file}: tensor {blocks.name} has shape {list(blocks.shape)}; MXFP4 needs "
            f"[experts, rows, groups, {mxfp4.GROUP // 2}]"
        )
    if scales is None or scales.dtype != torch.uint8 or scales.shape != blocks.shape[:-1]:
        found = "is missing" if scales is None else f"has shape {list(scales.shape)} or is not uint8"
        raise UserError(
            f"{blocks.file}: tensor {blocks.name} needs scales {name}{mxfp4.SCALES_SUFFIX}, uint8 "
            f"{list(blocks.shape[:-1])}, which {found}"
        )
    shape = mxfp4.logical_shape(blocks.shape)
    return Mxfp4(StoredTensor(name, shape, torch.bfloat16, blocks.file, "mxfp4"))


def _check_form(views: Mapping[str, View], quantization: Quantization | None, directory: Path) -> None:
    forms = {view.tensor.form for view in views.values()} - {"plain"}
    said = {quantization.method} if quantization else set()
    if forms != said:
        raise UserError(
            f"{directory}: config.json says {' and '.join(sorted(said)) or 'plain'} weights, the files hold "
            f"{' and '.join(sorted(forms)) or 'plain'} ones; put the `quantization_config` of these files into "
            "config.json, or remove it if they are plain"
        )


def _ranges(shape: tuple[int, ...], slices: tuple[slice, ...] | None) -> tuple[range, ...]:
    if slices is None:
        return tuple(range(n) for n in shape)
    padded = (*slices, *(slice(None) for _ in shape[len(slices) :]))
    return tuple(range(*s.indices(n)) for s, n in zip(padded, shape, strict=True))
