"""The plugin that runs inside SGLang's processes, through SGLang's own plugin interface (`sglang.srt.plugins`).

`register` is called by SGLang in each of its processes. It does nothing unless our launcher started the engine.
How SGLang finds it: `onpath/` holds a distribution with the entry point, and the launcher puts that folder on the
child's PYTHONPATH, so it works for any Python that the engine runs in. Should our own distribution be installed there
with an entry point of the same name, SGLang keeps one of the two.
"""

from __future__ import annotations

import os

MODE_VARIABLE = "MOE_ASYNCRL_ENGINE"


def register() -> None:
    """SGLang's entry point: close the CPU gaps in a CPU engine; leave a GPU engine and anybody else's engine alone."""
    if os.environ.get(MODE_VARIABLE) == "cpu":
        from moe_asyncrl.engine.plugin.cpu import register_cpu

        register_cpu()
