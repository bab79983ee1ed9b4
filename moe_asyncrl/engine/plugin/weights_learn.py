"""The first update with all weights: through the model's own loader, finding out on the way where everything goes.

Places that the trace found are held against what the parameters hold in the end, bit by bit (as digests, since the HF
tensors are gone by then). Only what holds is used from the next update on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import xxhash

from moe_asyncrl.engine.plugin.weights_places import Params, Place, Region, missing
from moe_asyncrl.engine.plugin.weights_state import Refused
from moe_asyncrl.engine.plugin.weights_trace import Load, Trace, trace_load, watched
from moe_asyncrl.weights.message import Opened
from moe_asyncrl.weights.message_part import Part, part_view

Named = list[tuple[str, torch.Tensor]]


class Assembly:
    """Puts tensors together that came in several parts, from whichever senders, and gives out whole ones.

    What came in one message with a part of a tensor that is not complete waits for it: a loader may need them together.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, torch.Tensor] = {}
        self._left: dict[str, int] = {}
        self._company: dict[str, set[str]] = {}
        """Names that are given out together."""

    def add(self, parts: Iterable[Part], payload: torch.Tensor) -> Named:
        """Whole tensors that can be loaded now. They may be views of the payload."""
        parts = list(parts)
        if all(p.whole for p in parts):
            return [(p.name, part_view(p, payload)) for p in parts]
        together: set[str] = set()
        for part in parts:
            view = part_view(part, payload)
            if part.name not in self._waiting:
                self._waiting[part.name] = torch.empty(part.shape, dtype=view.dtype, device=view.device)
                self._left[part.name] = self._waiting[part.name].numel()
            self._waiting[part.name][part.slices] = view
            self._left[part.name] -= part.elements
            together |= self._company.get(part.name, {part.name})
        self._company.update(dict.fromkeys(together, together))
        if any(self._left[name] for name in together):
            return []
        for name in together:
            del self._left[name], self._company[name]
        return [(name, self._waiting.pop(name)) for name in list(self._waiting) if name in together]

    def incomplete(self) -> list[str]:
        """Names of tensors of which a part never came."""
        return sorted(name for name, left in self._left.items() if left)


@dataclass(frozen=True)
class Known:
    """What a first update has taught about this rank's share of the model."""

    places: dict[str, tuple[Place, ...]] = field(default_factory=dict)
    """By HF tensor. One that is empty is not needed on this rank."""
    loader: frozenset[str] = frozenset()
    """HF tensors that have to go through the loader, whole."""


class Learner:
    """One update through the loader."""

    def __init__(self, load: Load, params: Callable[[], Params]) -> None:
        """`load`: the model's `load_weights`. `params`: its parameters and buffers by name, as they are now."""
        self._load, self._params = load, params
        self._assembly = Assembly()
        self._trace = Trace()
        self._digests: dict[Place, str] = {}
        self._written: list[Region] = []
        self._names: set[str] = set()

    def apply(self, stream: int, message: Opened[torch.Tensor]) -> None:
        """Load what is complete. Raises whatever the loader raises."""
        if message.kind != "dense":
            raise Refused("changes came where all weights were announced")
        named = self._assembly.add(message.parts, message.payload)
        if not named:
            return
        params = self._params()
        trace = trace_load(self._load, params, [(name, t.dtype, tuple(t.shape)) for name, t in named])
        self._trace.add(trace)
        tensors = dict(named)
        for place in trace.places:
            value = place.of(tensors[place.name])
            self._digests[place] = bits_digest(value.to(params[place.param].dtype))
        self._names.update(tensors)
        with watched(params) as regions:
            self._load(named)
        self._written += regions

    def check_complete(self) -> None:
        """Raises Refused, naming what is missing, unless every element of every parameter was written."""
        if absent := self._assembly.incomplete():
            raise Refused(f"a part of {absent[0]} never came ({len(absent)} tensors are not complete)")
        params = {n: p for n, p in self._params().items() if isinstance(p, torch.nn.Parameter)}
        if absent := missing(params, self._written):
            raise Refused(f"nothing came for some or all of parameter {absent[0]} ({len(absent)} are not complete)")

    def known(self) -> Known:
        """What holds, once the weights are final."""
        params = self._params()
        loader = set(self._trace.loader)
        for place in self._trace.places:
            if not _holds(place, self._digests[place], params):
                loader.add(place.name)
        places: dict[str, tuple[Place, ...]] = dict.fromkeys(self._names - loader, ())
        for place in self._trace.places:
            if place.name not in loader:
                places[place.name] += (place,)
        return Known(places, frozenset(loader))


def bits_digest(tensor: torch.Tensor) -> str:
    """Of a tensor's elements, row by row."""
    # A copy: one element is contiguous with any stride, but cannot be viewed as bytes with it.
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).cpu()
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)


def _holds(place: Place, digest: str, params: Params) -> bool:
    try:
        return bits_digest(place.region.view(params)) == digest
    except (RuntimeError, KeyError):
        # The parameter has another layout, or another name, once it is final.
        return False
