"""The import hook: runs patches at the moment the modules they concern are imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from megatron_patches.patch import Patch


class PatchFinder(MetaPathFinder):
    """Finds modules like Python's own path finder, and adds the patches that concern them."""

    def __init__(self, patches: tuple[Patch, ...]) -> None:
        self.patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec with its patches attached; None for a module that no patch concerns."""
        patches = [patch for patch in self.patches if patch.concerns(fullname)]
        for patch in patches:
            if patch.before is not None:
                patch.before(fullname)
        mendings = [patch.after for patch in patches if patch.after is not None]
        if not mendings:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_mend(module: ModuleType) -> None:
            run(module)
            for mend in mendings:
                mend(module)

        # The loader object stays the one Python made, so that `inspect` and tracebacks still find the source.
        spec.loader.exec_module = run_and_mend  # type: ignore[method-assign]
        return spec


def installed_finder() -> PatchFinder | None:
    """The hook of this process, if there is one."""
    return next((finder for finder in sys.meta_path if isinstance(finder, PatchFinder)), None)
