"""What a model's own `load_weights` does with HF tensors, found by running it on tensors without memory.

While it runs, every write into a parameter is noted and left out, and every tensor remembers which HF tensors it was
made of. A copy of an HF tensor's view (or of several, concatenated) is a place. HF tensors that reach a parameter in
any other way have to go through the loader itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from moe_asyncrl.engine.plugin.weights_places import Params, Place, Region, place_of

Spec = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a whole HF tensor."""
Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_CATS = (torch.cat, torch.concat, torch.concatenate)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass
class Trace:
    """What became of some HF tensors. A tensor in neither `places` nor `loader` is not needed here."""

    places: list[Place] = field(default_factory=list)
    loader: set[str] = field(default_factory=set)
    """Names of HF tensors that are more than copied."""

    def add(self, other: Trace) -> None:
        """Take the other's findings over."""
        self.places += other.places
        self.loader |= other.loader


def trace_load(load: Load, params: Params, specs: Sequence[Spec]) -> Trace:
    """Trace one call of `load` with these tensors. If it fails on them together, each is tried alone; one that fails
    alone is for the loader. `params` keep their values."""
    try:
        return _trace(load, params, specs)
    except Exception:
        if len(specs) == 1:
            return Trace(loader={specs[0][0]})
    found = Trace()
    for spec in specs:
        found.add(trace_load(load, params, [spec]))
    return found


def _trace(load: Load, params: Params, specs: Sequence[Spec]) -> Trace:
    tensors = [(name, torch.empty(shape, dtype=dtype, device="meta")) for name, dtype, shape in specs]
    mode = _Mode(params, tensors)
    with _no_threads(), mode, torch.no_grad():
        load(tensors)
    mode.trace.places = [p for p in mode.trace.places if p.name not in mode.trace.loader]
    return mode.trace


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Mode(TorchFunctionMode):
    def __init__(self, params: Params, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.trace = Trace()
        self._home = {_key(p): name for name, p in params.items()}
        self._source = {_key(t): (name, tuple(t.shape)) for name, t in tensors}
        self._made_of: dict[int, frozenset[str]] = {_key(t): frozenset([name]) for name, t in tensors}
        self._cats: dict[int, tuple[torch.Tensor, Sequence[torch.Tensor], int]] = {}
        # Storages are told apart by their address, so none may go before the end.
        self._kept: list[Any] = [params, tensors]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is not None and self._writes(func, target, args, kwargs):
            return target if func is not torch.Tensor.__setitem__ else None
        result = func(*args, **kwargs)
        sources = self._sources((args, kwargs))
        if sources:
            for made in tree_leaves(result):
                if isinstance(made, torch.Tensor) and _key(made) not in self._made_of:
                    self._made_of[_key(made)] = sources
                    self._kept.append(made)
            if func in _CATS and isinstance(result, torch.Tensor):
                dim = int(kwargs.get("dim", args[1] if len(args) > 1 else 0))
                self._cats[_key(result)] = (result, tuple(args[0]), dim)
        return result

    def _sources(self, values: Any) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                found |= self._made_of.get(_key(value), frozenset())
        return found

    def _writes(self, func: Any, target: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Note a write. False: the call is none, and has to be done."""
        home = self._home.get(_key(target))
        if home is None:
            if func is torch.Tensor.copy_ and not target.is_meta and (sources := self._sources(args[1:])):
                # A temporary of the loader's: its values are not there, only where they come from.
                self._made_of[_key(target)] = self._made_of.get(_key(target), frozenset()) | sources
                self._kept.append(target)
                return True
            return False
        if func is torch.Tensor.copy_:
            self._copy(home, target, args[1] if len(args) > 1 else kwargs["src"])
        elif func is torch.Tensor.__setitem__:
            with torch._C.DisableTorchFunction():
                part = target[args[1]]
            if _key(part) == _key(target) and isinstance(args[2], torch.Tensor):
                self._copy(home, part, args[2])
            else:
                self._opaque(args[2:])
        elif func is _SET_DATA or _in_place(func):
            self._opaque(args[1:])
        else:
            return False
        return True

    def _copy(self, home: str, target: torch.Tensor, source: torch.Tensor) -> None:
        whole, pieces, dim = self._cats.get(_key(source), (None, (), 0))
        if whole is not None and _same_view(whole, source) and source.shape == target.shape:
            at = 0
            for piece in pieces:
                self._copy(home, target.narrow(dim, at, piece.shape[dim]), piece)
                at += piece.shape[dim]
            return
        name, shape = self._source.get(_key(source), (None, ()))
        place = None if name is None else place_of(name, source, shape, home, target)
        if place is None:
            self._opaque((source,))
        elif target.numel():
            self.trace.places.append(place)

    def _opaque(self, sources: Any) -> None:
        """Something else than a copy, or a constant, is written."""
        self.trace.loader |= self._sources(sources)


class Watch(TorchFunctionMode):
    """Notes which regions of parameters a real `load_weights` writes. Use it as `with watched(params) as regions`."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.regions: list[Region] = []
        self._home = {_key(p): name for name, p in params.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is None:
            return result
        if func is torch.Tensor.__setitem__ or _in_place(func):
            home = self._home.get(_key(target))
            if func is torch.Tensor.__setitem__ and home is not None:
                part = target[args[1]]
                target = part if _key(part) == _key(target) else target
            if home is not None:
                offset = int(target.storage_offset())
                self.regions.append(Region(home, offset, tuple(target.shape), target.stride()))
        return result


@contextlib.contextmanager
def watched(params: Params) -> Iterator[list[Region]]:
    """Run a loader in it, in this thread; afterwards the list has what was written, in the order of the writes."""
    watch = Watch(params)
    with _no_threads(), watch:
        yield watch.regions


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "detach_")


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


class _Inline(concurrent.futures.Executor):
    """Runs each call at once: a mode of torch holds for one thread only."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextlib.contextmanager
def _no_threads() -> Iterator[None]:
    original = concurrent.futures.ThreadPoolExecutor
    concurrent.futures.ThreadPoolExecutor = _Inline  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        concurrent.futures.ThreadPoolExecutor = original  # type: ignore[misc]
