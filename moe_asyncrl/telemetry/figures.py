"""Figures as people read them."""

from __future__ import annotations


def number(value: float | int | None, form: str) -> str:
    """A number in a format, `-` for what is not known."""
    if value is None:
        return "-"
    return f"{int(value):d}" if form == "d" else f"{value:{form}}"


def duration(seconds: float) -> str:
    """`75` -> `1m15s`."""
    whole = round(max(0.0, seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{secs:02d}s" if minutes else f"{secs}s"
