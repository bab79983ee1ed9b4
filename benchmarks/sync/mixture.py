"""The model of the weight benchmark: SmolLM2 made into a mixture of experts, kept in a build folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from moe_asyncrl.checkpoint.upcycle import upcycle
from moe_asyncrl.checkpoint.upcycle_plan import Upcycling
from tests.engines.smollm2 import write_smollm2

BUILD = Path(__file__).resolve().parents[2] / "build" / "weight_sync"
EXPERTS = 6
"""0.56 billion parameters: 1.1 GB in bfloat16."""


def mixture(experts: int = EXPERTS) -> Path:
    """HF directory of the mixture in float32, as its dense source; made if it is not there (2.2 GB for 6 experts)."""
    out = BUILD / f"smollm2-{experts}-experts"
    if not out.is_dir():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD, prefix="dense-") as scratch:
            write_smollm2(Path(scratch) / "dense")
            upcycle(Path(scratch) / "dense", out, Upcycling(experts=experts))
    return out


def forget(experts: int = EXPERTS) -> None:
    """Remove it."""
    shutil.rmtree(BUILD / f"smollm2-{experts}-experts", ignore_errors=True)
