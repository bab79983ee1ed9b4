"""What can go wrong between us and an engine. Every message starts with the engine's name."""

from __future__ import annotations

from moe_asyncrl.data.errors import EngineLost, UserError


class EngineUnreachable(EngineLost, UserError):
    """The connection failed or broke: the engine is dead, or not there yet."""


class EngineTimeout(EngineLost, UserError):
    """The engine did not answer before the deadline. The message names what was waited for."""


class EngineUnwell(EngineLost, UserError):
    """The engine says that it cannot serve now: its weights are not whole, until an update ends that."""


class EngineRefused(UserError):
    """The engine answered that it will not do this, or that it failed. The message has its reason."""


class MalformedReply(UserError):
    """The engine's answer is not what was asked for: a field is missing, mistyped or of the wrong length."""


class NoEngines(UserError):
    """No engine is left that could take the request."""
