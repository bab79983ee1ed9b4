"""The one JSON object that every benchmark prints as its last line."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from typing import Any


def print_result(
    name: str, *, ratios: Mapping[str, float | None], figures: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Print the result. `ratios` come from one run; `figures` are absolute and depend on the machine."""
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    print(
        json.dumps(
            {
                "name": name,
                "ratios": {k: _short(v) for k, v in ratios.items()},
                "figures": {k: _short(v) for k, v in figures.items()},
                "settings": {**settings, **machine},
            }
        ),
        flush=True,
    )


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
