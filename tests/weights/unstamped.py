"""An engine in which requests keep the key of the prefix cache that their client sent: a fault, planted from outside.

The server's processes find a plugin of SGLang's beside ours on their path, which takes our hook's work away.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec.structs import replace

from moe_asyncrl.engine.server import Server
from tests.engines.fixtures import TestEngine

PLUGIN = """
def activate():
    from moe_asyncrl.engine.plugin import weights_engine, weights_hooks

    def leave(req, changes):
        pass

    weights_engine.stamp = weights_hooks.stamp = leave
"""


def unstamped(like: TestEngine, folder: Path) -> TestEngine:
    """A server like another one, with the fault."""
    info = folder / "unstamped-1.dist-info"
    info.mkdir(parents=True)
    (folder / "unstamped.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unstamped\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nunstamped = unstamped:activate\n")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    args = like.server.args

    server = Server.start(
        replace(args, port=0),
        cpu=True,
        log_path=folder / "unstamped.log",
        name="unstamped",
        environ={**os.environ, "PYTHONPATH": path},
    )
    return TestEngine(server, like.model, like.reference, like.routing)
