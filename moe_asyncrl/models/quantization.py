"""How a checkpoint's `config.json` says that its weights are quantised.

FP8: https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md; MXFP4: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moe_asyncrl.data.errors import UserError

LOGICAL_DTYPE = "bfloat16"
"""The type that quantised weights are read as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """A quantised form that is read here. Which tensors have it is told by the headers of the files, not by this."""

    method: Literal["fp8", "mxfp4"]
    block: tuple[int, int] = (128, 128)
    """FP8: rows and columns that share a scale."""
    power_of_two: bool = False
    """FP8: every scale is a power of two (`scale_fmt: ue8m0`)."""
    stated: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """`quantization_config` as it stands in the config."""


def read_quantization(config: Mapping[str, Any], fail: Callable[[str], UserError]) -> Quantization | None:
    """The quantisation of a parsed `config.json`; None where the weights are plain.

    `fail` makes the error of a message, with the file's name in it.

    Raises:
        UserError: a method that is not read here, or FP8 of another kind than e4m3 in blocks.
    """
    found = config.get("quantization_config")
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if method == "mxfp4":
        return Quantization(method="mxfp4", stated=found)
    if method != "fp8":
        raise fail(
            f"`quantization_config` has method {method!r}: only fp8 (e4m3 in blocks) and mxfp4 are read; "
            "use the unquantised weights"
        )
    for name, known in (
        ("fmt", ("e4m3", "float8_e4m3fn")),
        ("activation_scheme", ("dynamic",)),
        ("scale_fmt", ("float32", "ue8m0")),
    ):
        if found.get(name) is not None and found[name] not in known:
            raise fail(f"`quantization_config.{name}` {found[name]!r} is not supported: only {' or '.join(known)} is")
    block = found.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise fail(
            f"`quantization_config.weight_block_size` is {block!r}: only FP8 with a scale for each block of rows and "
            "columns is supported, such as [128, 128]"
        )
    return Quantization(
        method="fp8",
        block=(block[0], block[1]),
        power_of_two=found.get("scale_fmt") == "ue8m0",
        stated=found,
    )
