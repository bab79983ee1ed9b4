"""The HF tensors of a model in groups that travel together, and the kinds that these groups are of.

A large model has tens of thousands of groups and a few dozen kinds: two groups are of one kind if they differ only in
the numbers of their layer and expert. Plans work out a kind once and repeat it, so that their cost hardly grows with
layers and experts.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from moe_asyncrl.models.algebra import HfTensor, as_view
from moe_asyncrl.models.families.mtp import is_of_mtp
from moe_asyncrl.models.parameter_map import Entry, parameter_map
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.fuse import fused_group

ITEM_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Kind:
    """What all groups of a kind share. `tensors` and `entries` are those of the first such group."""

    tensors: tuple[HfTensor, ...]
    entries: tuple[Entry, ...]
    """The Megatron parameters that these tensors are, or are parts of."""
    per_expert: bool
    """The group is of one expert."""
    mtp: bool
    """The group is of a multi-token-prediction layer."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Names of the tensors, with `*` for each number."""
        return tuple(pattern_of(t.name) for t in self.tensors)


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are fused, or are scales and biases of one weight."""

    name: str
    kind: int
    tensors: tuple[int, ...]
    """Numbers in export order."""
    first_entry: Entry
    """Says where the group stands: stage, layer, expert."""


@dataclass(frozen=True, slots=True)
class Groups:
    """All tensors of a model, in export order, and their groups, in the order of their first tensors."""

    tensors: tuple[HfTensor, ...]
    groups: tuple[Group, ...]
    kinds: tuple[Kind, ...]

    def of_kind(self) -> list[list[int]]:
        """Numbers of the groups of each kind."""
        found: list[list[int]] = [[] for _ in self.kinds]
        for number, group in enumerate(self.groups):
            found[group.kind].append(number)
        return found


def pattern_of(name: str) -> str:
    """A name with `*` in place of the numbers of layers and experts."""
    return _NUMBER.sub(".*", name)


@lru_cache(maxsize=4)
def model_groups(spec: ModelSpec) -> Groups:
    """The groups of a model. Raises UserError for a family whose fused tensors are not known."""
    numbers: dict[str, int] = {}
    tensors: list[HfTensor] = []
    members: dict[str, list[int]] = {}
    entries: dict[str, list[Entry]] = {}
    for entry in parameter_map(spec).entries:
        if entry.tied_copy:
            continue
        name = ""
        for tensor in entry.hf:
            number = numbers.get(tensor.name)
            name = fused_group(spec.family, tensor.name)
            if number is None:
                number = numbers[tensor.name] = len(tensors)
                tensors.append(tensor)
                members.setdefault(name, []).append(number)
        entries.setdefault(name, []).append(entry)
    kinds: dict[Hashable, int] = {}
    found: list[Kind] = []
    groups: list[Group] = []
    for name, own in members.items():
        first = entries[name][0]
        mtp = bool(spec.mtp_layers) and is_of_mtp(spec, tensors[own[0]].name)
        stacked = len({e.expert for e in entries[name]}) > 1
        key = (mtp, _signature([tensors[n] for n in own], entries[name], stacked))
        if key not in kinds:
            kinds[key] = len(found)
            per_expert = first.expert is not None and not stacked
            found.append(Kind(tuple(tensors[n] for n in own), tuple(entries[name]), per_expert, mtp))
        groups.append(Group(name, kinds[key], tuple(own), first))
    return Groups(tuple(tensors), tuple(groups), tuple(found))


def _signature(tensors: list[HfTensor], entries: list[Entry], stacked: bool) -> Hashable:
    """Equal for groups whose trainer and engine shards are cut alike."""
    index = {tensor.name: i for i, tensor in enumerate(tensors)}
    parts: list[Hashable] = [(pattern_of(t.name), t.shape, t.dtype) for t in tensors]
    for entry in entries:
        views = [as_view(source) for source in entry.op.sources]
        parts.append(
            (
                type(entry.op).__name__,
                getattr(entry.op, "groups", 0),
                entry.op.pads_rows,
                entry.shard_axis,
                entry.expert if stacked else entry.expert is None,
                tuple((index[v.tensor.name], v.index, v.transposed, v.first, v.step) for v in views),
            )
        )
    return tuple(parts)
