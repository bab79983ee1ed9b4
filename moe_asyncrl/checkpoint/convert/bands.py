"""Rows of an HF tensor that are moved together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Band:
    """Rows of a weight, and where what is made of them goes."""

    weight: str
    start: int
    stop: int
    at: int
    """Byte of the file."""
    size: int
    """Bytes there."""
