"""Types of stored tensors, by torch's names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ITEM_SIZES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1, "int64": 8, "float64": 8, "int32": 4}
)
"""Bytes of an element."""
SAFETENSORS: Mapping[str, str] = MappingProxyType(
    {
        "float32": "F32",
        "bfloat16": "BF16",
        "float16": "F16",
        "float8_e4m3fn": "F8_E4M3",
        "uint8": "U8",
        "int64": "I64",
        "float64": "F64",
        "int32": "I32",
    }
)
"""What the headers of safetensors files call them."""
WEIGHTS = ("float32", "bfloat16", "float16")
"""Types that weights may have."""
