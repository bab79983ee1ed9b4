"""Where Megatron-Core's distributed checkpoints keep a model's parameters: under which keys, in which global tensors.

A global tensor is the parameter as one process holds it, so a checkpoint knows no layout. In front of its own axes
stand one for the layer (where all layers are alike, `decoder.layers.` has no number then) and one for the expert. Gate
and up are two pieces along the rows; that is how Megatron-Core cuts them, not another order.

Source: `sharded_state_dict` of `megatron/core/transformer/{transformer_block,mlp}.py`, `moe/experts.py`,
`multi_token_prediction.py` and `models/gpt/gpt_layer_specs.py` (`sharded_state_dict_keys_map`) of Megatron-Core 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moe_asyncrl.models.algebra import shard_shape
from moe_asyncrl.models.parameter_map import Entry, parameter_map
from moe_asyncrl.models.spec import ModelSpec

LayerKeys = Literal["separate", "stacked"]
"""`decoder.layers.7.` or one tensor for all layers."""
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.\d+\.")
_GROUPED = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)\d+$")
_LAYER = re.compile(r"^decoder\.layers\.\d+\.")
_NORM_BEFORE = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)
"""Norms that Megatron-Core's local layers store as if they were part of the linear layer behind them."""


@dataclass(frozen=True, slots=True)
class Lead:
    """An axis in front of a parameter's own."""

    index: int
    size: int


@dataclass(frozen=True, slots=True)
class Keyed:
    """A parameter in a distributed checkpoint."""

    entry: Entry
    keys: tuple[str, ...]
    """The key of Megatron-Core's local layers, and that of its Transformer Engine layers if it is another one."""
    lead: tuple[Lead, ...]
    own_shape: tuple[int, ...]
    """Shape of the parameter."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the global tensor, without vocabulary padding."""
        return (*(lead.size for lead in self.lead), *self.own_shape)

    @property
    def kind(self) -> str:
        """What it is in whichever layer and expert: the key without the layer's number."""
        return _LAYER.sub("decoder.layers.", self.keys[0])


def default_layer_keys(spec: ModelSpec) -> LayerKeys:
    """How this project's trainer has it: stacked for dense models; MoE models say for each layer what it is."""
    return "separate" if spec.is_moe else "stacked"


def can_stack(spec: ModelSpec) -> bool:
    """Whether all layers have the same parameters."""
    return len(set(spec.moe_layers)) == 1


def keyed_parameters(spec: ModelSpec, layers: LayerKeys) -> Iterator[Keyed]:
    """Every parameter that a checkpoint holds, in the order of the map; copies of tied weights are not stored."""
    for entry in parameter_map(spec).entries:
        if entry.tied_copy or is_mtp_copy(entry):
            continue
        lead: list[Lead] = []
        if layers == "stacked" and entry.layer is not None:
            lead.append(Lead(entry.layer, spec.num_layers))
        if entry.expert is not None:
            lead.append(Lead(entry.expert, spec.num_experts))
        keys = tuple(_key(name, layers) for name in dict.fromkeys(_names(entry, spec)))
        yield Keyed(entry, keys, tuple(lead), shard_shape(entry.op, entry.shard_axis, 1))


def is_mtp_copy(entry: Entry) -> bool:
    """Whether it is a copy of embedding or output layer that HF keeps with a multi-token-prediction layer."""
    return entry.name.startswith("mtp_copy.")


def layer_keys_of(keys: Iterator[str]) -> LayerKeys:
    """How a checkpoint with these keys has its layers."""
    return "separate" if any(_LAYER.match(key) for key in keys) else "stacked"


def object_keys(parameters: Iterator[Keyed]) -> Iterator[str]:
    """Keys of the empty objects (`_extra_state`) that modules of either kind of layer ask for when they are loaded.

    All modules with weights are named, although each kind of layers has such objects for some of them only: a
    checkpoint may hold more than a model asks for. Attention cores have no weights and are named too.
    """
    seen: set[str] = set()
    for keyed in parameters:
        for key in keyed.keys:
            module, _, name = key.rpartition(".")
            if name not in ("weight", "layer_norm_weight"):
                continue
            modules = [module]
            if module.endswith(".self_attention.linear_proj"):
                modules.append(module.removesuffix("linear_proj") + "core_attention")
            for found in modules:
                shard = ".".join(str(lead.index) for lead in keyed.lead) or "0"
                shape = ".".join(str(lead.size) for lead in keyed.lead) or "1"
                full = f"{found}._extra_state/shard_{shard}_{shape}"
                if full not in seen:
                    seen.add(full)
                    yield full


def _names(entry: Entry, spec: ModelSpec) -> Iterator[str]:
    """Names of a parameter: of local layers as Megatron-Core stores them, and of Transformer Engine's."""
    local = entry.name
    if spec.mla is None:
        for norm, stored in _NORM_BEFORE:
            local = local.replace(norm, stored)
    yield _EXPERT.sub(".mlp.experts.experts.", local)
    yield _GROUPED.sub(r".mlp.experts.experts.\1.\2", entry.te_name or entry.name)


def _key(name: str, layers: LayerKeys) -> str:
    return _LAYER.sub("decoder.layers.", name) if layers == "stacked" else name
