"""The digest that binds routing rows and sampling masks to the tokens they belong to."""

from __future__ import annotations

import numpy as np
import xxhash

from moe_asyncrl.data.trajectory import SamplingMask


def binding_digest(tokens: np.ndarray, experts: np.ndarray | None, mask: SamplingMask | None) -> str:
    """xxh3-128 (hex) over tokens int32 [T], experts [T-1, L, K] and the mask, with their types and shapes.

    A row moved to another token, layer or trajectory changes it.
    """
    h = xxhash.xxh3_128()
    for array in (tokens, experts, *((mask.indptr, mask.ids) if mask is not None else ())):
        if array is None:
            h.update(b"-;")
            continue
        h.update(f"{array.dtype.str}{list(array.shape)};".encode())
        h.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return h.hexdigest()
