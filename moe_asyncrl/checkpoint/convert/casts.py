"""Values of one type as another, in raw items, rounded as torch rounds: to the nearest, ties to even."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_NOT_A_NUMBER = 0x7FC0


def values(raw: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """float32 values of raw items."""
    import numpy as np

    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        return raw.view(np.float16).astype(np.float32)
    if dtype != "float32":
        raise ValueError(f"{dtype} is no type of weights")
    found: np.ndarray[Any, Any] = raw.view(np.float32)
    return found


def cast(raw: np.ndarray[Any, Any], of: str, to: str) -> np.ndarray[Any, Any]:
    """Raw items of type `to` from raw items of type `of`. Infinity is what does not fit, NaN stays NaN."""
    import numpy as np

    if of == to:
        return raw
    found = values(raw, of)
    if to == "float32":
        return found.view(np.uint32)
    if to == "float16":
        with np.errstate(over="ignore"):
            return found.astype(np.float16).view(np.uint16)
    bits = found.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(found), np.uint16(_NOT_A_NUMBER), rounded)
