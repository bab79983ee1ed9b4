"""What the specification tests look at inside built models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from moe_asyncrl.config.capability import Capabilities, layer_implementation
from moe_asyncrl.models.layout import Layout
from tests.pool.machine import CPU
from tests.train.parity_jobs import micro_batch, tiny_spec
from tests.train.sharded import fill


@contextlib.contextmanager
def names_of_transformer_engine() -> Iterator[None]:
    """Let Megatron-Core name a recent Transformer Engine's layers without the package; nothing can be built of them."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.extensions import transformer_engine_spec_provider as provider
    from megatron.core.models.gpt import gpt_layer_specs as specs

    # what the modules' own imports would have set
    names = [
        (specs, "TENorm", transformer_engine.TENorm),
        (specs, "TEFusedMLP", transformer_engine.TEFusedMLP),
        (specs, "TESpecProvider", provider.TESpecProvider),
        (provider, "TEColumnParallelGroupedLinear", object()),
        (provider, "TERowParallelGroupedLinear", object()),
        (provider, "is_te_min_version", lambda version: True),
    ]
    before = [(module, name, getattr(module, name, None)) for module, name, _ in names]
    for module, name, value in names:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def layer_classes(machine: Capabilities) -> dict[str, str]:
    """Names of the classes that the factory picks for an MoE layer on a machine."""
    from megatron.core.extensions import transformer_engine

    from moe_asyncrl.train.model import transformer_config
    from moe_asyncrl.train.specs.layers import block_spec

    # the configuration of a CPU: a GPU's cannot be made here, and the factory takes the machine separately
    config = transformer_config(tiny_spec(), Layout(), CPU, moe_grouped_gemm=machine.grouped_gemm)
    te = layer_implementation(machine) == "transformer_engine"
    with names_of_transformer_engine() if te else contextlib.nullcontext():
        layer = block_spec(config, machine).layer_specs[-1].submodules
    attention = layer.self_attention.submodules
    classes = {
        "input_layernorm": layer.input_layernorm,
        "linear_qkv": attention.linear_qkv,
        "linear_proj": attention.linear_proj,
        "core_attention": attention.core_attention,
        "experts": layer.mlp.submodules.experts.module,
    }
    # Without the package its layers are stand-ins that share a class: only their identity tells them apart.
    stand_ins = {id(part): name for name, part in vars(transformer_engine).items() if name.startswith("TE")}
    return {name: stand_ins.get(id(part)) or part.__name__ for name, part in classes.items()}


def built_config(layout: Layout, **build: Any) -> dict[str, Any]:
    """Fields of a built model's configuration."""
    from moe_asyncrl.train.model import build_model

    (chunk,) = build_model(tiny_spec(rope_theta=5e5), layout, CPU, **build)
    names = (
        *("calculate_per_token_loss", "variable_seq_lengths", "hidden_dropout", "attention_dropout"),
        *("moe_token_dispatcher_type", "moe_router_dtype", "moe_enable_routing_replay", "recompute_granularity"),
        "sequence_parallel",
    )
    fields = {name: getattr(chunk.config, name) for name in names}
    inverse = chunk.rotary_pos_emb.inv_freq
    base = float(inverse[1] ** (-inverse.numel()))
    return fields | {"params_dtype": str(chunk.config.params_dtype), "rotary_base": round(base, -2)}


class FixedExperts:
    """A replay object that always answers with the same two experts."""

    def __init__(self) -> None:
        self.calls = 0

    def get_replay_topk(self, scores: torch.Tensor, topk: int, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and numbers of experts 0 and 7 for every token."""
        self.calls += 1
        chosen = torch.tensor([0, 7]).expand(scores.shape[0], topk)
        return scores.gather(1, chosen), chosen


def routed_by_replay(**build: Any) -> tuple[int, list[list[int]]]:
    """How often routers asked a replay object in one step, and which experts each MoE layer used."""
    from moe_asyncrl.train.model import build_model

    spec = tiny_spec()
    (chunk,) = build_model(spec, Layout(), CPU, **build)
    fill([chunk], vocab_size=spec.vocab_size)
    replay, used = FixedExperts(), {}
    for number, layer in enumerate(chunk.decoder.layers):
        if spec.moe_layers[number]:
            layer.mlp.router.router_replay = replay
            layer.mlp.router.register_forward_hook(
                lambda _module, _inputs, output, number=number: used.update({number: output[1].any(0).nonzero()})
            )
    batch = micro_batch(0, spec.vocab_size)
    chunk(batch["tokens"], None, None, labels=batch["labels"], packed_seq_params=batch["packed"]).sum().backward()
    return replay.calls, [used[number].flatten().tolist() for number in sorted(used)]


def padding_probability(layout: Layout, vocab_size: int) -> tuple[int, float]:
    """Padding rows on this rank, and the largest probability that a softmax over all ranks' logits gives them."""
    from moe_asyncrl.train.model import build_model

    spec = tiny_spec(vocab_size=vocab_size)
    (chunk,) = build_model(spec, layout, CPU)
    batch = micro_batch(0, vocab_size)
    with torch.no_grad():
        logits = chunk(batch["tokens"], None, None, packed_seq_params=batch["packed"])
    padding = logits < torch.finfo(logits.dtype).min / 4
    rows = int(padding.all(dim=(0, 1)).sum())
    return rows, float(torch.softmax(logits, -1)[padding].max()) if rows else 0.0
