"""Starts SGLang's server in this process: `python -m moe_asyncrl.engine.plugin.serve SGLANG_ARGUMENTS`."""

from __future__ import annotations

import os
import runpy
import sys

from moe_asyncrl.engine.command import API_KEY_VARIABLE


def main() -> None:
    """Hands the API key over without showing it in the process list, then is SGLang's own launcher."""
    key = os.environ.pop(API_KEY_VARIABLE, None)
    if key is not None:
        sys.argv += ["--api-key", key]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
