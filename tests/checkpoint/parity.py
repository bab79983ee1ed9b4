"""What every checkpoint must stand: the same numbers as transformers on a layout, and its own bytes on the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moe_asyncrl.models.layout import Layout
from tests.checkpoint.models import relative
from tests.pool.pool import WorkerPool

TOLERANCE = 1e-4
CONVERT = "tests.checkpoint.jobs:convert"


def check_conversion(
    pool: WorkerPool, layout: Layout, hf_dir: Path, expected: np.ndarray[Any, Any], out_dir: Path
) -> None:
    """Load `hf_dir` on a layout, compare its logits with transformers' (`expected`), and export it to `out_dir`."""
    assert expected.std() > 1
    results = pool.run(CONVERT, layout=layout, hf_dir=str(hf_dir), out_dir=str(out_dir))
    found = [logits for logits in results if logits is not None]
    assert len(found) == layout.world_size // layout.pp
    for logits in found:
        assert relative(logits, expected) < TOLERANCE
    assert {p.name: p.read_bytes() for p in out_dir.iterdir()} == {p.name: p.read_bytes() for p in hf_dir.iterdir()}
