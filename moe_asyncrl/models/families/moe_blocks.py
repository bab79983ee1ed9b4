"""Parameters of mixture-of-experts layers: router, experts, shared expert, expert bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_asyncrl.models.algebra import Copy, HfTensor, Stack, View
from moe_asyncrl.models.families.blocks import At, decoder_layer, feed_forward, gated, pre_mlp_norm
from moe_asyncrl.models.parameter_map import Entry
from moe_asyncrl.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeNames:
    """What HF calls the parts of an MoE layer; the defaults are those of most families."""

    block: str = "mlp."
    expert_bias: str = "gate.e_score_correction_bias"
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router_dtype: str | None = None
    """The type that router weights are stored in, where it is not the model's."""


NAMES = MoeNames()
MIXTRAL_NAMES = MoeNames(
    block="block_sparse_moe.", expert_bias="e_score_correction_bias", gate_up_down=("w1", "w3", "w2")
)


def moe_mlp(spec: ModelSpec, at: At, names: MoeNames = NAMES, *, stacked: bool = False) -> Iterator[Entry]:
    """Norm, router, experts with two matrices each, and the shared expert where there is one.

    `stacked`: HF has all experts in `experts.gate_up_proj` [experts, 2 * width, hidden], gate over up, and
    `experts.down_proj` [experts, hidden, width].
    """
    yield from pre_mlp_norm(spec, at, dense=False)
    if names.router_dtype is None:
        yield _router(spec, at, names)
    yield from _stacked(spec, at, names) if stacked else _each(spec, at, names)
    if spec.shared_expert_size:
        theirs = names.block + "shared_experts."
        yield from feed_forward(at, "mlp.shared_experts.", theirs, spec.hidden_size, spec.shared_expert_size)


def _each(spec: ModelSpec, at: At, names: MoeNames) -> Iterator[Entry]:
    for expert in range(spec.num_experts):
        prefix = f"{at.theirs}{names.block}experts.{expert}."
        gate, up, down = gated(prefix, spec.hidden_size, spec.moe_intermediate_size, names.gate_up_down)
        yield expert_entry(at, expert, "linear_fc1", "weight", Stack((gate, up)), 0)
        yield expert_entry(at, expert, "linear_fc2", "weight", Copy(down), 1)


def _stacked(spec: ModelSpec, at: At, names: MoeNames) -> Iterator[Entry]:
    experts, hidden, width = spec.num_experts, spec.hidden_size, spec.moe_intermediate_size
    prefix = f"{at.theirs}{names.block}experts."
    gate_up = HfTensor(prefix + "gate_up_proj", (experts, 2 * width, hidden))
    down = HfTensor(prefix + "down_proj", (experts, hidden, width))
    for expert in range(experts):
        halves = tuple(View(tensor=gate_up, index=expert, first=first, count=width) for first in (0, width))
        yield expert_entry(at, expert, "linear_fc1", "weight", Stack(halves), 0)
    for expert in range(experts):
        yield expert_entry(at, expert, "linear_fc2", "weight", Copy(View(tensor=down, index=expert)), 1)


def expert_entry(at: At, expert: int, which: str, kind: str, op: Copy | Stack, axis: int | None) -> Entry:
    """A weight or bias of one expert. Transformer Engine numbers the tensors of one grouped layer instead."""
    return Entry(
        name=f"{at.mine}mlp.experts.local_experts.{expert}.{which}.{kind}",
        te_name=f"{at.mine}mlp.experts.{which}.{kind}{expert}",
        op=op,
        shard_axis=axis,
        layer=at.layer,
        place=at.place,
        expert=expert,
    )


def _router(spec: ModelSpec, at: At, names: MoeNames) -> Entry:
    shape = (spec.num_experts, spec.hidden_size)
    return Entry(
        name=at.mine + "mlp.router.weight",
        op=Copy(HfTensor(f"{at.theirs}{names.block}gate.weight", shape, names.router_dtype)),
        layer=at.layer,
        place=at.place,
    )


def expert_bias(spec: ModelSpec, at: At, names: MoeNames = NAMES) -> Entry:
    """The bias that takes part in the choice of experts. Always float32: in bfloat16 it would change the choice."""
    return Entry(
        name=at.mine + "mlp.router.expert_bias",
        op=Copy(HfTensor(f"{at.theirs}{names.block}{names.expert_bias}", (spec.num_experts,), "float32")),
        layer=at.layer,
        place=at.place,
        buffer=True,
    )


def float32_routers(spec: ModelSpec, names: MoeNames = NAMES) -> Iterator[Entry]:
    """What routers keep in float32, layer by layer. It comes last, so that all of it travels in one bucket."""
    for layer in spec.moe_layer_indices:
        if names.router_dtype is not None:
            yield _router(spec, decoder_layer(layer), names)
        yield expert_bias(spec, decoder_layer(layer), names)
