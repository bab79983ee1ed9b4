"""Learning-rate schedules: a pure function of the step, so that a resume cannot advance one twice."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, *, peak: float, schedule: Schedule, warmup_steps: int, total_steps: int, min_ratio: float
) -> float:
    """Learning rate of the update that makes step `step` into step `step + 1`.

    Linear from 0 to `peak` over the first `warmup_steps` updates (the last of them runs at the peak), then by
    `schedule` down to `peak * min_ratio`, which the last update and any after it run at.

    Args:
        step: updates done so far, from 0.
        peak: highest rate.
        schedule: form of the decay after the warm-up.
        warmup_steps: updates of the warm-up.
        total_steps: updates of the whole run.
        min_ratio: last rate over the peak, 0 to 1.

    Raises:
        ValueError: `step` is negative.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative")
    done = step + 1
    if done <= warmup_steps:
        return peak * done / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (done - warmup_steps) / max(1, total_steps - warmup_steps))
    fall = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1.0 - min_ratio) * fall)
