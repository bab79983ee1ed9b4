"""The whole replay matrix: every layout, packing, recomputation and family, each with an error planted as well.

    python -m tests.replay.soak_matrix [--first N]

Prints a line for each case, with the deviations of loss and gradients from one process and that of the planted error;
stops at the first that fails.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.pool.pool import WorkerPool
from tests.replay.matrix import Matrix, all_cases


def main() -> None:
    """All cases, or those from the N-th on."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--first", type=int, default=1, help="number of the case to start with (default: 1)")
    first = options.parse_args().first
    with tempfile.TemporaryDirectory(prefix="replay-soak-") as folder, WorkerPool(size=8) as pool:
        matrix = Matrix(pool, Path(folder))
        cases, worst, least = all_cases(), 0.0, float("inf")
        for number, case in enumerate(cases[first - 1 :], first):
            began = time.monotonic()
            loss, gradients = matrix.check(case)
            planted = matrix.check_planted(case)
            worst, least = max(worst, loss, gradients), min(least, planted)
            print(
                f"{number}/{len(cases)} {case}: loss {loss:.1e}, gradients {gradients:.1e}, planted {planted:.1e}, "
                f"{time.monotonic() - began:.1f} s",
                flush=True,
            )
    print(f"replay matrix: {len(cases) - first + 1} cases within {worst:.1e}, planted errors of {least:.1e} and more")


if __name__ == "__main__":
    main()
