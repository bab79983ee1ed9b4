"""A stand-in for the `torch` module whose CUDA calls do their work on the CPU. Used by `cuda_calls`."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "as_tensor", "linspace", "eye"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "empty_strided", "load"),
)


class Proxy(types.ModuleType):
    """A module that answers with its own attributes first and the original's after them."""

    def __init__(self, original: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(vars(original))  # a copy, since __getattr__ would cost a Python call on each use
        self.__dict__.update(replaced)
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


class NullStream:
    """Stands for a CUDA stream or event: every wait is over at once."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __enter__(self) -> NullStream:
        return self

    def __exit__(self, *args: object) -> None: ...

    def wait_stream(self, *args: object) -> None: ...

    def wait_event(self, *args: object) -> None: ...

    def record(self, *args: object) -> None: ...

    def wait(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: NullStream | None = None) -> NullStream:
        return event if event is not None else NullStream()

    def elapsed_time(self, other: object) -> float:
        return 0.0


def _nothing(*args: object, **kwargs: object) -> None: ...


def _zero(*args: object, **kwargs: object) -> int:
    return 0


@contextlib.contextmanager
def _stream(stream: object = None) -> Iterator[object]:
    yield stream


def _cuda_proxy() -> Proxy:
    stream = NullStream()
    nvtx = types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_stream)
    return Proxy(
        torch.cuda,
        {
            **dict.fromkeys(("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"), _nothing),
            **dict.fromkeys(
                ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), _zero
            ),
            **dict.fromkeys(("current_stream", "default_stream"), lambda *args, **kwargs: stream),
            "current_device": lambda: torch.device("cpu"),
            "device_count": lambda: 1,
            "is_available": lambda: False,
            "is_current_stream_capturing": lambda: False,
            "stream": _stream,
            "Stream": NullStream,
            "Event": NullStream,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
            "nvtx": nvtx,
        },
    )


def _on_cpu(device: Any) -> Any:
    """The CPU where a CUDA device is asked for; anything else as it is."""
    if device is None:
        return None
    if isinstance(device, int) or torch.device(device).type == "cuda":
        return torch.device("cpu")
    return device


def _factory(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # pinned memory needs a CUDA driver
        return make(*args, **kwargs)

    return made_on_cpu


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
    return torch.autocast("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


@functools.cache
def torch_on_cpu() -> Proxy:
    """The stand-in, one for the whole process."""
    replaced: dict[str, Any] = {name: _factory(getattr(torch, name)) for name in FACTORIES}
    return Proxy(torch, {**replaced, "cuda": _cuda_proxy(), "autocast": _autocast})
