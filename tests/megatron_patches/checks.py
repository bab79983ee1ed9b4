"""One check a patch: it passes with all patches and fails with that one left out. Each runs in a process of its own."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_asyncrl.models.layout import Layout
from tests.megatron_patches.forked import enter, on_ranks
from tests.pool.machine import CPU
from tests.train.parity_jobs import tiny_spec
from tests.train.sharded import assemble, fill, gradients, relative

ALONE = Layout()


def alone() -> None:
    """Become the only rank."""
    enter(ALONE, 0, str(Path(tempfile.mkdtemp()) / "store"))


def forward_backward(layout: Layout = ALONE, **build: Any) -> list[Any]:
    """Build the tiny model under a layout, run it forward and backward on 8 tokens; the wrapped chunks."""
    from moe_asyncrl.train.model import build_model, wrap_ddp

    spec = tiny_spec(num_layers=2, moe_layers=(False, True))
    chunks = build_model(spec, layout, CPU, **build)
    fill(chunks, vocab_size=spec.vocab_size)
    model = wrap_ddp(chunks, distributed_optimizer=True)
    tokens = torch.arange(8)[None]
    model[0](tokens, tokens, None, labels=tokens).sum().backward()
    return model


def installed_package(name: str, code: str) -> None:
    """Put a package with the given code first on the import path."""
    folder = Path(tempfile.mkdtemp())
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    sys.path.insert(0, str(folder))


def broken_transformer_engine() -> None:
    installed_package("transformer_engine", "raise RuntimeError('no CUDA driver')")
    import megatron.core.models.gpt  # noqa: F401


def foreign_apex() -> None:
    installed_package("apex", "")
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    assert gpt_layer_specs.LNImpl is WrappedTorchNorm


def model_runs() -> None:
    alone()
    forward_backward()


def generator_is_forked() -> None:
    alone()
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    before = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with get_cuda_rng_tracker().fork():
            draws.append(torch.rand(4))
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(*draws)


def nothing_is_compiled() -> None:
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.jit import jit_fuser

    assert jit_fuser(nothing_is_compiled) is nothing_is_compiled
    assert not hasattr(fused_bias_swiglu.swiglu, "_torchdynamo_orig_callable")


def optimizer(model: list[Any], **settings: Any) -> Any:
    """Megatron-Core's Adam over wrapped chunks."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    return get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=0.1, **settings), model)


def optimizers_step() -> None:
    alone()
    for bf16 in (False, True):
        model = forward_backward(dtype=torch.bfloat16 if bf16 else torch.float32)
        for distributed in (True, False):
            made = optimizer(model, use_distributed_optimizer=distributed, bf16=bf16)
            if not (bf16 and not distributed):  # the buffers were made for the distributed optimizer
                made.step()


def uneven_parts_travel() -> None:
    def gather_and_scatter() -> None:
        from megatron.core.tensor_parallel import mappings

        group, rank, sizes = dist.group.WORLD, dist.get_rank(), [1, 3]
        own = torch.full((sizes[rank], 2), float(rank + 1))
        gathered = mappings._gather_along_first_dim(own, group, sizes)
        assert torch.equal(gathered[:, 0], torch.tensor([1.0, 2.0, 2.0, 2.0]))
        scattered = mappings._reduce_scatter_along_first_dim(gathered * (rank + 1), group, sizes)
        assert torch.equal(scattered, own * 3)

    on_ranks(Layout(dp=2), gather_and_scatter)


def experts_spread() -> None:
    on_ranks(Layout(dp=2, ep=2), lambda: len(forward_backward(Layout(dp=2, ep=2))))


def norms_take_sequence_parallelism() -> None:
    def marked() -> None:
        (model,) = forward_backward(Layout(tp=2))
        norms = [p for name, p in model.named_parameters() if "norm" in name]
        assert norms and all(p.sequence_parallel for p in norms)

    on_ranks(Layout(tp=2), marked)


def steps_survive_a_resume() -> None:
    alone()
    model = forward_backward()
    first = optimizer(model, use_distributed_optimizer=True)
    saved = first.state_dict()
    for _ in range(3):
        first.step()
    saved = first.state_dict()
    second = optimizer(model, use_distributed_optimizer=True)
    second.load_state_dict(saved)
    second.step()
    inner = getattr(second, "chained_optimizers", [second])
    steps = {float(state["step"]) for one in inner for state in one.optimizer.state.values()}
    assert steps == {4.0}, steps


def optimizer_state_is_copied() -> None:
    """Loading copies tensors by name; PyTorch's `step` is not among those that upstream hands over."""
    steps_survive_a_resume()
    made = optimizer(forward_backward(), use_distributed_optimizer=True)
    made.state_dict()
    inner = getattr(made, "chained_optimizers", [made])[0]
    parameter, (group, order) = next(iter(inner.model_param_group_index_map.items()))
    main = inner.optimizer.param_groups[group]["params"][order]
    ones = {name: torch.ones_like(main) for name in ("param", "exp_avg", "exp_avg_sq")}
    with torch.no_grad():
        inner._set_main_param_and_optimizer_states(parameter, ones)
    assert inner.optimizer.state[main]["exp_avg"].eq(1).all()


def checkpoint_is_written_here() -> None:
    alone()
    import psutil
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    folder = tempfile.mkdtemp()
    value = torch.arange(6.0)
    dist_checkpointing.save({"x": ShardedTensor.from_rank_offsets("x", value)}, folder)
    assert not psutil.Process().children(recursive=True), "the save started processes"
    loaded = dist_checkpointing.load({"x": ShardedTensor.from_rank_offsets("x", torch.zeros(6))}, folder)
    assert torch.equal(loaded["x"], value)


def latent_attention_runs() -> None:
    """Multi-latent attention on one rank."""
    (parts,) = on_ranks(Layout(), partial(latent_attention_parts, Layout()))
    assert any("linear_kv_down_proj" in part.name for part in parts)


def latent_attention_gradients() -> None:
    """Gradients of multi-latent attention on two tensor-parallel ranks equal those of one."""
    layouts = Layout(), Layout(tp=2)
    one, two = (assemble(on_ranks(layout, partial(latent_attention_parts, layout))) for layout in layouts)
    worst = max(relative(two[name], one[name]) for name in one)
    assert worst < 1e-5, f"gradients deviate by {worst:.1e}"


def latent_attention_parts(layout: Layout) -> list[Any]:
    """This rank's gradients of a one-layer model with multi-latent attention."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from moe_asyncrl.train.model import transformer_config, wrap_ddp
    from moe_asyncrl.train.specs.layers import block_spec

    spec = tiny_spec(num_layers=1, moe_layers=(False,), num_kv_heads=4, vocab_size=260)
    plain = transformer_config(spec, layout, CPU)
    kept = {name: getattr(plain, name) for name in KEPT_FIELDS}
    latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    config = MLATransformerConfig(multi_latent_attention=True, rope_type="rope", **latent, **kept)
    model = GPTModel(config, block_spec(config, CPU), spec.vocab_size, 64, position_embedding_type="rope")
    fill([model], vocab_size=spec.vocab_size)
    wrapped = wrap_ddp([model])
    tokens = torch.arange(8)[None]
    wrapped[0](tokens, tokens, None, labels=tokens).sum().backward()
    config.finalize_model_grads_func(wrapped, torch.tensor(8))
    return gradients(wrapped)


KEPT_FIELDS = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "normalization", "layernorm_epsilon"),
    *("gated_linear_unit", "activation_func", "add_bias_linear", "qk_layernorm", "hidden_dropout", "params_dtype"),
    *("attention_dropout", "tensor_model_parallel_size", "sequence_parallel", "use_cpu_initialization"),
    *("variable_seq_lengths", "moe_token_dispatcher_type", "persist_layer_norm"),
    *("calculate_per_token_loss", "bias_dropout_fusion", "gradient_accumulation_fusion"),
)


def packed_positions_start_anew() -> None:
    alone()
    from types import SimpleNamespace

    from megatron.core.models.common.embeddings import apply_rotary_pos_emb

    lengths = [3, 5]
    config: Any = SimpleNamespace(
        apply_rope_fusion=False, mrope_section=None, rotary_interleaved=False, multi_latent_attention=False
    )
    freqs = torch.randn(sum(lengths), 1, 1, 8)  # as long as all sequences together: the case that upstream misreads
    tokens = torch.randn(sum(lengths), 2, 8)
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = apply_rotary_pos_emb(tokens, freqs, config, cu_seqlens=offsets, cp_group=dist.group.WORLD)
    apart = [
        apply_rotary_pos_emb(x[:, None], freqs[: len(x)], config, cp_group=dist.group.WORLD)[:, 0]
        for x in tokens.split(lengths)
    ]
    assert torch.equal(packed, torch.cat(apart))


def biased_experts(layout: Layout) -> Any:
    """A gpt-oss of two layers."""
    from moe_asyncrl.train.model import build_model

    biased = {"family": "gpt_oss", "qk_norm": False, "attention_bias": True, "linear_biases": True}
    windows = {"attention_sinks": True, "sliding_window": 4, "windowed_layers": (True, False)}
    spec = tiny_spec(num_layers=2, moe_layers=(True, True), **biased, **windows)
    return build_model(spec, layout, CPU)[0]


def biased_experts_learn() -> None:
    alone()
    chunk = biased_experts(ALONE)
    tokens = torch.arange(8)[None]
    chunk(tokens, tokens, None, labels=tokens).sum().backward()
    assert all(p.grad is not None for name, p in chunk.named_parameters() if "linear_fc2.bias" in name)


def expert_biases_are_not_shared() -> None:
    """What is marked as seen in part is summed over tensor-parallel ranks."""

    def marked() -> None:
        biases = {n: p for n, p in biased_experts(Layout(tp=2, ep=2)).named_parameters() if n.endswith("fc2.bias")}
        assert biases
        assert not any(p.sequence_parallel for p in biases.values())

    on_ranks(Layout(tp=2, ep=2), marked)


def expert_biases_are_added_once() -> None:
    """The shares of all ranks come to the bias, and each rank has its whole gradient."""

    def shared() -> None:
        modules = dict(biased_experts(Layout(tp=2)).named_modules())
        layer = modules["decoder.layers.0.mlp.experts.local_experts.0.linear_fc2"]
        layer.bias.data.normal_()
        _, share = layer(torch.zeros(3, layer.weight.shape[1]))
        assert torch.equal(share, layer.bias / 2)
        share.sum().backward()
        assert torch.equal(layer.bias.grad, torch.ones_like(layer.bias))

    on_ranks(Layout(tp=2), shared)


def padding_is_not_counted() -> None:
    """As many tokens as experts, three of them padding; then nothing but padding under a balance loss."""
    alone()
    from moe_asyncrl.train.model import build_model

    spec = tiny_spec(num_layers=1, moe_layers=(True,))
    sigmoid = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    balance = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    (chunk,) = build_model(spec, ALONE, CPU, **sigmoid, **balance)
    fill([chunk], vocab_size=spec.vocab_size)
    router, tokens = chunk.decoder.layers[0].mlp.router, torch.arange(8)[None]
    maps: list[torch.Tensor] = []
    router.register_forward_hook(lambda _m, _i, out: maps.append(out[1]))
    padding = tokens > 4
    chunk(tokens, tokens, None, padding_mask=padding).sum().backward()
    assert torch.equal(router.local_tokens_per_expert, maps[0][:5].sum(0).float())
    chunk(tokens, tokens, None, padding_mask=padding | True).sum().backward()
    assert router.weight.grad.isfinite().all()


CHECKS: dict[str, Callable[[], None]] = {
    "unusable_transformer_engine": broken_transformer_engine,
    "unusable_apex": foreign_apex,
    "cuda_calls": model_runs,
    "rng_tracker": generator_is_forked,
    "jit_fuser": nothing_is_compiled,
    "optimizer_tensor_types": optimizers_step,
    "uneven_collectives": uneven_parts_travel,
    "router_gemm": model_runs,
    "router_padding": padding_is_not_counted,
    "moe_split_sizes": experts_spread,
    "norm_sequence_parallel": norms_take_sequence_parallelism,
    "torch_adamw_state": optimizer_state_is_copied,
    "checkpoint_writer": checkpoint_is_written_here,
    "mla_layer_check": latent_attention_runs,
    "mla_down_projections": latent_attention_gradients,
    "packed_rope": packed_positions_start_anew,
    "expert_output_bias": biased_experts_learn,
    "expert_bias_gradient": expert_biases_are_not_shared,
    "expert_bias_share": expert_biases_are_added_once,
}
