"""What binds routing rows and sampling masks to the tokens they belong to: a tree of digests.

    root (xxh3-128, in the header) ── tokens, sampling mask, types
          └── block of MoE layers (xxh3-64, in the header) ── one digest of 32 bits for each of the T-1 rows
                                                                    └── the row's experts, its number, its token

So whoever holds a few rows of a few blocks can check them: with the rows' digests against the block, and with the
blocks against the root. A row that stands for another token, position or layer has another digest. Rows that several
trajectories share have the same digests in each of them, as they stand at the same place behind the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from moe_asyncrl.data.trajectory import SamplingMask

Experts = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
_PLACES = np.uint64(1 << 62)
"""Where the factors of a row's number and token begin, behind those of any layer."""


class RoutingBlock(msgspec.Struct, frozen=True, array_like=True):
    """MoE layers [start, end) of a trajectory's rows, which travel and are checked together."""

    start: int
    end: int
    digest: str
    """xxh3-64 (hex) of the row digests, uint32 [T-1]."""


def row_digests(
    experts: np.ndarray, tokens: npt.NDArray[np.int32], rows: npt.NDArray[np.integer], *, first_layer: int
) -> npt.NDArray[np.uint32]:
    """uint32 [n] of experts [n, layers, K]: layers `first_layer`, … of rows `rows` [n] with their `tokens` [n].

    The upper half of a sum of words times random odd factors, mod 2^64 (multilinear hashing): a change of experts
    goes unseen once in about 2^32 times. One pass over the bytes.
    """
    n, layers, k = experts.shape
    if not n:
        return np.zeros(0, dtype=np.uint32)
    unit = math.gcd(k * experts.itemsize, 8)
    words = np.ascontiguousarray(experts).reshape(n, layers * k).view(f"<u{unit}")
    each = k * experts.itemsize // unit
    # Factors follow the layer's number in the whole model: rows of another layer have another digest.
    factors = _odd(np.arange(first_layer * each, (first_layer + layers) * each, dtype=np.uint64))
    of_row, of_token = _odd(np.arange(2, dtype=np.uint64) + _PLACES)
    total = (words if unit == 8 else words.astype(np.uint64)) @ factors
    total += rows.astype(np.uint64) * of_row + tokens.astype(np.int64).astype(np.uint64) * of_token
    return (_mixed(total) >> np.uint64(32)).astype(np.uint32)


def block_digest(digests: npt.NDArray[np.uint32]) -> str:
    """The digest of a block from those of its rows, uint32 [T-1]."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(digests, dtype="<u4").data)


def mask_digest(mask: SamplingMask | None) -> str:
    """xxh3-64 (hex) of a sampling mask; empty without one."""
    if mask is None:
        return ""
    h = xxhash.xxh3_64()
    for array in (mask.indptr, mask.ids):
        _add(h, array)
    return h.hexdigest()


def root_digest(tokens: npt.NDArray[np.int32], *, rows: str, blocks: Sequence[RoutingBlock], mask: str) -> str:
    """xxh3-128 (hex) over the tokens int32 [T], the element type and shape of the rows as text, and what is below."""
    h = xxhash.xxh3_128()
    _add(h, tokens)
    h.update(f"{rows};{[(b.start, b.end, b.digest) for b in blocks]};{mask}".encode())
    return h.hexdigest()


def _add(h: xxhash.xxh3_64 | xxhash.xxh3_128, array: np.ndarray) -> None:
    h.update(f"{array.dtype.str}{list(array.shape)};".encode())
    h.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)


def _odd(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A random odd factor for each number, always the same."""
    return _mixed((numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
