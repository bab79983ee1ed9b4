"""What a patch is: the fault's name, where it sits, when it applies, and how it is mended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from moe_asyncrl.config.capability import Capabilities


def on_cpu(capabilities: Capabilities) -> bool:
    """For faults that only a machine without CUDA meets."""
    return not capabilities.cuda


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One upstream fault and its mending, bound to the import of the modules it sits in."""

    name: str
    seen_in: str
    """Versions of the upstream package in which the fault was seen."""
    modules: tuple[str, ...]
    """Full names of the modules; `package.*` also means all modules below the package."""
    applies: Callable[[Capabilities], bool]
    """Whether a machine meets the fault; where it does not, nothing is touched."""
    after: Callable[[ModuleType], None] | None = None
    """Called with each of `modules` right after it ran, before anyone else sees it."""
    before: Callable[[str], None] | None = None
    """Called with the name of each of `modules` before it is looked for. May raise ModuleNotFoundError to hide it."""

    def concerns(self, module: str) -> bool:
        """Whether the module named is one of `modules`."""
        for name in self.modules:
            if module == name or (name.endswith(".*") and (module + ".").startswith(name[:-1])):
                return True
        return False
