"""Checks for the runner of `gpu_check` to run: one of each outcome."""

import os

from moe_asyncrl.config.capability import Capabilities
from moe_asyncrl.data.errors import UserError


def passes(capabilities: Capabilities) -> str:
    return f"looked at {type(capabilities).__name__}"


def fails(_capabilities: Capabilities) -> str:
    raise UserError("logits: difference 1.0e+00, allowed 1e-04")


def crashes(_capabilities: Capabilities) -> str:
    os.abort()
