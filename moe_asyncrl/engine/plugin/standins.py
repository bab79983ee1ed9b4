"""Import stand-ins for what SGLang imports everywhere and runs only on GPUs: triton, torchvision, sgl_kernel.

They answer imports and decorators, and raise when a kernel is launched. The finder stands last on `sys.meta_path`, so a
real package, where there is one, always wins.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

KERNELS = pathlib.Path(__file__).with_name("kernel_standin.py")


class StandInError(RuntimeError):
    """A GPU-only kernel was reached on a machine without it."""


class _ClassMeta(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class InertModule(types.ModuleType):
    """A module in which every lower-case name is another such module and every capitalised name an empty class.

    Called with one function it returns the function (a decorator); called with anything else it returns such a
    decorator. It is false, so that `if triton:` style probes take the other branch.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__package__ = name
        self.__file__ = __file__
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        made: Any
        if name[:1].isupper():
            made = _ClassMeta(name, (), {"__module__": self.__name__})
        else:
            made = sys.modules.setdefault(full, InertModule(full))
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return lambda fn: fn

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False


class Kernel:
    """What `triton.jit` gives here: it keeps the function's name and raises on launch."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "?")
        self.__doc__ = fn.__doc__
        self.__module__ = fn.__module__

    def __getitem__(self, grid: Any) -> Any:
        raise StandInError(
            f"the Triton kernel {self.__module__}.{self.__name__} was reached, and there is no Triton here"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self[None]


class Config:
    """`triton.Config`: plain values that autotune tables are made of."""

    def __init__(
        self, kwargs: dict[str, Any] | None = None, num_warps: int = 4, num_stages: int = 2, **extra: Any
    ) -> None:
        self.kwargs = kwargs or {}
        self.num_warps = num_warps
        self.num_stages = num_stages
        self.extra = extra


def _jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    return Kernel(fn) if fn is not None else Kernel


def _unchanged(*args: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


def _fill_triton(module: Any) -> None:
    module.__version__ = "3.0.0"
    module.jit = _jit
    module.autotune = _unchanged
    module.heuristics = _unchanged
    module.Config = Config
    module.cdiv = lambda a, b: -(a // -b)
    module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1


def _fill_torchvision(module: Any) -> None:
    module.__version__ = "0.0.0"


FILL: dict[str, Callable[[Any], None]] = {"triton": _fill_triton, "torchvision": _fill_torchvision}


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `triton`, `torchvision` (and any module below them) inert modules, and `sgl_kernel` our torch version."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "sgl_kernel":
            return importlib.util.spec_from_file_location(fullname, KERNELS)
        if fullname.split(".")[0] in FILL:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        known = sys.modules.get(spec.name)
        return known if isinstance(known, InertModule) else InertModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        fill = FILL.get(module.__name__)
        if fill is not None:
            fill(module)


class AbsentFinder(importlib.abc.MetaPathFinder):
    """Says that Megatron-Core is not installed, also where it is.

    SGLang's debug dumper imports it if it can, for trainers that dump through it. An engine never trains, and the
    import costs each server two seconds.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] == "megatron":
            raise ModuleNotFoundError(f"No module named {fullname!r} (engines do not load the trainer)", name=fullname)
        return None


def install() -> None:
    """Add the finders, once: what must be absent before every real finder, the stand-ins behind."""
    if not any(isinstance(f, StandInFinder) for f in sys.meta_path):
        sys.meta_path.insert(0, AbsentFinder())
        sys.meta_path.append(StandInFinder())
