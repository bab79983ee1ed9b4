"""Start-up code of every Python process inside an engine; nothing else has this folder on its path.

The server launcher puts this folder first on the child's PYTHONPATH. Python then imports this file before anything
else, in the server and in each process it spawns.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))


class _OwnPackage(importlib.abc.MetaPathFinder):
    """Finds `moe_asyncrl` where this file stands, when the engine's Python does not have it installed.

    The folder above the package may be another environment's site-packages, so it must not go on the path as a whole.
    """

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname != "moe_asyncrl":
            return None
        init = os.path.join(_PACKAGE, "__init__.py")
        return importlib.util.spec_from_file_location(fullname, init, submodule_search_locations=[_PACKAGE])


def _run_next_sitecustomize() -> None:
    """The user's own sitecustomize, which ours hides by standing first on the path."""
    rest = [p for p in sys.path if os.path.abspath(p or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_next_sitecustomize()
# At the front: an engine must run the same code as the process that started it, not another version that happens to be
# installed.
sys.meta_path.insert(0, _OwnPackage())
if os.environ.get("MOE_ASYNCRL_ENGINE") == "cpu":
    from moe_asyncrl.engine.plugin import standins

    standins.install()
