"""`moe-asyncrl convert` with units of a few kilobytes, so that a small conversion can be interrupted in its middle.

    python -m tests.checkpoint.convert.small_units SECONDS_A_UNIT ARGUMENTS…

`SECONDS_A_UNIT`: how long the parent rests after each unit.
"""

from __future__ import annotations

import sys
import time

from moe_asyncrl.checkpoint.convert import convert
from moe_asyncrl.checkpoint.convert.to_hf import plan_to_hf
from moe_asyncrl.checkpoint.convert.to_megatron import plan_to_megatron
from moe_asyncrl.checkpoint.convert.workspace import Workspace
from moe_asyncrl.cli import main

UNIT_BYTES = 60_000

if __name__ == "__main__":
    record, rest = Workspace.record, float(sys.argv[1])

    def slowly(self: Workspace, unit: int, target: str) -> None:
        record(self, unit, target)
        time.sleep(rest)

    Workspace.record = slowly  # type: ignore[method-assign]
    convert.plan_to_megatron = lambda *a: plan_to_megatron(*a, unit_bytes=UNIT_BYTES)  # type: ignore[assignment]
    convert.plan_to_hf = lambda *a, **k: plan_to_hf(*a, **k, unit_bytes=UNIT_BYTES)  # type: ignore[assignment]
    sys.exit(main(["convert", *sys.argv[2:]]))
