"""What the trainer's ranks do in the storms: weights of many versions, one update after the other."""

from __future__ import annotations

import time
from typing import Any

import torch

from moe_asyncrl.checkpoint.hf_load import load_hf
from tests.weights.jobs import HELD, _parameters
from tests.weights.mix import between, group_of, mix_of

ENDS: dict[str, dict[str, torch.Tensor]] = {}
"""This rank's parameters of the two models that versions are mixed of."""


def hold_two(second: str) -> None:
    """After `start`: also read the second model."""
    ENDS["a"] = {name: value.detach().clone() for name, value in _parameters().items()}
    load_hf(HELD["chunks"], HELD["spec"], HELD["layout"], second)
    ENDS["b"] = {name: value.detach().clone() for name, value in _parameters().items()}


def set_version(version: int) -> None:
    """This rank's weights become those of a version."""
    mix = mix_of(version)
    with torch.no_grad():
        for name, value in _parameters().items():
            value.copy_(between(ENDS["a"][name], ENDS["b"][name], mix.amounts[group_of(name)]))


def storm(first: int, count: int, every_s: float) -> list[dict[str, Any]]:
    """`count` updates, at least `every_s` seconds from the beginning of one to that of the next."""
    found = []
    for version in range(first, first + count):
        began = time.time()
        set_version(version)
        report = HELD["publisher"].publish(version)
        found.append(
            {
                "version": version,
                "began": began,
                "ended": time.time(),
                "engines": report.engines,
                "lost": report.lost,
                "delta": report.delta,
                "pause": report.pause_seconds,
            }
        )
        time.sleep(max(0.0, began + every_s - time.time()))
    return found
