"""Asynchronous reinforcement learning for large mixture-of-experts models. docs/architecture.md shows the rooms."""

__version__ = "0.1.0"
