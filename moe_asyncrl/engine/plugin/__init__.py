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
    """SGLang's entry point.

    An engine of ours receives weights and says what made its routing rows, a CPU engine has its gaps closed, and
    anybody else's engine is left alone.
    """
    mode = os.environ.get(MODE_VARIABLE)
    if mode == "cpu":
        from moe_asyncrl.engine.plugin.cpu import register_cpu

        register_cpu()
    if mode in ("cpu", "gpu"):
        from moe_asyncrl.engine.plugin.routing_rows import register_routing
        from moe_asyncrl.engine.plugin.weights_hooks import register_weights

        register_weights()
        register_routing()
