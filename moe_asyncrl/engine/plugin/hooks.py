"""Registration of hooks with SGLang, which would only log that one failed and serve without it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

Hook = tuple[str, str, str]
"""Target in SGLang, kind of hook, module and function in this package."""


def register_hooks(hooks: Iterable[Hook], why: str) -> None:
    """Raises SystemExit if SGLang has no such target; `why` says what needs it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, kind, where in hooks:
        module, function = where.split(":")
        hook = getattr(importlib.import_module(f"moe_asyncrl.engine.plugin.{module}"), function)
        try:
            pkgutil.resolve_name(target)
        except (ImportError, AttributeError) as e:
            raise SystemExit(f"Error: this version of SGLang has no {target}, {why}: {e}") from e
        HookRegistry.register(target, hook, HookType(kind))
