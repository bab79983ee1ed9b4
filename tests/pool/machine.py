"""The machine that the test workers stand for: a CPU, wherever the tests run."""

from moe_asyncrl.config.capability import Capabilities

CPU = Capabilities()
