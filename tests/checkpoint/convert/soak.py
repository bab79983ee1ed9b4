"""The long form of the conversion tests: every family on every layout in both types, and many kills.

    python -m tests.checkpoint.convert.soak --kills 20

Prints a line for each case; stops at the first that fails.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from tests.checkpoint.convert.interrupted import killed_at_random, started
from tests.checkpoint.convert.support import contents, layouts
from tests.checkpoint.convert.test_megatron import check
from tests.checkpoint.families import FAMILY_MODELS
from tests.checkpoint.models import make
from tests.pool.pool import WorkerPool


def families(scratch: Path) -> None:
    """Loaded and saved by Megatron-Core on every layout, bit for bit."""
    with WorkerPool(size=4) as pool:
        for name in FAMILY_MODELS:
            for layout in layouts(name):
                for dtype in ("float32", "bfloat16"):
                    began = time.monotonic()
                    with tempfile.TemporaryDirectory(dir=scratch) as place:
                        check(pool, name, layout, dtype, Path(place))
                    print(f"{name} {layout} {dtype}: ok, {time.monotonic() - began:.1f} s", flush=True)


def kills(scratch: Path, times: int) -> None:
    """Conversions that are killed `times` times in each direction come to the same bytes."""
    model = make(scratch, "moe5")
    with started("hf-to-megatron", str(model), str(scratch / "whole")) as process:
        assert process.wait(60) == 0
    expected = {"hf-to-megatron": contents(scratch / "whole"), "megatron-to-hf": contents(model)}
    chance = random.Random(0)
    for what, source in (("hf-to-megatron", model), ("megatron-to-hf", scratch / "whole")):
        done = number = 0
        while done < times:
            number += 1
            at_once = min(5, times - done)
            out = scratch / f"{what}-{number}"
            resumed = killed_at_random(what, source, out, expected[what], at_once, seed=chance.randrange(1 << 30))
            done += at_once
            print(f"{what}: killed {at_once} times, went on {resumed} times: the same bytes", flush=True)


def main() -> None:
    """Both."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=20, help="in each direction (default: 20)")
    args = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="convert-soak-") as place:
        kills(Path(place), args.kills)
        families(Path(place))
    print("all ok")


if __name__ == "__main__":
    main()
