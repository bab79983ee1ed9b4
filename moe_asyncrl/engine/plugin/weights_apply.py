"""Updates after the first one: elements go straight to their places; what has none goes through the loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from moe_asyncrl.engine.plugin.weights_learn import Assembly, Known
from moe_asyncrl.engine.plugin.weights_places import Params, Place, write_dense, write_sparse
from moe_asyncrl.engine.plugin.weights_state import Refused
from moe_asyncrl.engine.plugin.weights_trace import Load
from moe_asyncrl.weights.message import Opened
from moe_asyncrl.weights.message_part import Part, part_view
from moe_asyncrl.weights.sparse import decode_all


class Applier(Protocol):
    """Takes the messages of one update."""

    def apply(self, stream: int, message: Opened[torch.Tensor]) -> None:
        """Put a message that has passed its checks into the model."""
        ...

    def check_complete(self) -> None:
        """Raises Refused, naming a parameter that is missing."""
        ...


class Placer:
    """One update by places. `sparse`: changes; else all weights."""

    def __init__(self, known: Known, load: Load, params: Params, *, sparse: bool) -> None:
        self._known, self._load, self._params, self._sparse = known, load, params, sparse
        self._device = next(iter(params.values())).device
        self._assembly = Assembly()
        self._seen: Counter[Place] = Counter()
        """Elements that came for each place."""
        self._loaded: set[str] = set()
        self._parts: dict[str, list[Part]] = {}

    def apply(self, stream: int, message: Opened[torch.Tensor]) -> None:
        """Raises Refused for a tensor that is not known or has another shape, and what the loader raises."""
        if self._sparse != (message.kind == "sparse"):
            raise Refused(
                f"a {message.kind} message came in an update of {'changes' if self._sparse else 'all weights'}"
            )
        if self._sparse:
            self._changes(message)
        else:
            self._whole(stream, message)

    def check_complete(self) -> None:
        """Raises Refused, naming what is missing, unless everything that this rank needs came, and once."""
        if self._sparse:
            return
        for name, places in self._known.places.items():
            for place in places:
                if self._seen[place] != (need := int(np.prod(place.region.size))):
                    raise Refused(
                        f"{self._seen[place]} of {need} elements of {name} came, which make up parameter {place.param}"
                    )
            _check_apart(self._parts.get(name, ()))
        if absent := self._known.loader - self._loaded:
            raise Refused(f"{min(absent)} never came, or not all of it ({len(absent)} tensors for the loader)")

    def _whole(self, stream: int, message: Opened[torch.Tensor]) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        through: list[Part] = []
        for part in message.parts:
            if part.name in self._known.loader:
                through.append(part)
                continue
            places = self._places(part)
            if not places:
                continue
            self._parts.setdefault(part.name, []).append(part)
            found = write_dense(self._params, places, part, part_view(part, message.payload))
            for place, target, source in found:
                targets.append(target)
                sources.append(source)
                self._seen[place] += target.numel()
        if targets:
            torch._foreach_copy_(targets, sources)
        if through:
            named = self._assembly.add(through, message.payload)
            if named:
                self._load(named)
                self._loaded.update(name for name, _ in named)

    def _changes(self, message: Opened[torch.Tensor]) -> None:
        for changes in decode_all(message.parts, message.payload):
            positions, values = changes.positions.to(self._device), changes.values.to(self._device)
            for which, start, stop in zip(changes.which, changes.starts[:-1], changes.starts[1:], strict=True):
                part = message.parts[int(which)]
                if start < stop and (places := self._places(part)):
                    write_sparse(self._params, places, part, positions[start:stop], values[start:stop])

    def _places(self, part: Part) -> tuple[Place, ...]:
        places = self._known.places.get(part.name)
        if places is None:
            why = "goes through the loader" if part.name in self._known.loader else "is not part of this model"
            raise Refused(f"{part.name} {why}")
        if places and places[0].shape != part.shape:
            raise Refused(f"{part.name} has the shape {list(part.shape)}; this model's has {list(places[0].shape)}")
        return places


def _check_apart(parts: Sequence[Part]) -> None:
    for i, a in enumerate(parts):
        for b in parts[:i]:
            if all(_touch(x, y) for x, y in zip(a.ranges, b.ranges, strict=True)):
                raise Refused(f"elements of {a.name} came twice: {list(a.ranges)} and {list(b.ranges)}")


def _touch(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    if a[2] == b[2] == 1:
        return max(a[0], b[0]) < min(a[1], b[1])
    return bool(set(range(*a)) & set(range(*b)))
