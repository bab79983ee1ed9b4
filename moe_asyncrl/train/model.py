"""Building the model: the chunks of a GPT that this rank owns, from a ModelSpec, a layout and the machine's choices."""

from __future__ import annotations

from typing import Any, Literal

import torch

from moe_asyncrl.config.capability import Capabilities, choose
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.trainable import check_trainable
from moe_asyncrl.train.specs import config_fields
from moe_asyncrl.train.specs.positions import position_arguments, yarn_attributes

Recompute = Literal["full", "selective"]


def transformer_config(
    spec: ModelSpec,
    layout: Layout,
    capabilities: Capabilities,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute | None = None,
    router_dtype: Literal["fp32", "fp64"] = "fp32",
    **overrides: Any,
) -> Any:
    """Megatron-Core's `TransformerConfig`: the model's fields, the layout's, and the training choices of this project.

    No dropout; losses are summed per token and divided once (`calculate_per_token_loss`); micro-batches may differ in
    length; the all-to-all dispatcher; sequence parallelism with tensor parallelism, as MoE layers require. The RNG
    lives on the CPU, so that an initialisation does not depend on the device. `overrides` are further fields.

    Raises:
        UserError: the model does not fit the layout.
    """
    check_trainable(spec, layout)
    choices = choose(capabilities)
    splits_biases = spec.linear_biases and layout.etp > 1
    if splits_biases and choices.layers == "transformer_engine":
        raise UserError(
            f"layout {layout}: the experts of {spec.family} have biases, and Transformer Engine's layers would add "
            f"each of them {layout.etp} times under etp {layout.etp}; use ep above 1 with etp 1, or tp 1"
        )
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    fields: dict[str, Any] = {
        **config_fields(spec),
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        # Megatron-Core refuses to split experts with biases; the patch `expert_bias_share` mends why.
        "expert_tensor_parallel_size": 1 if splits_biases else layout.etp,
        "context_parallel_size": layout.cp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # for dense models too: the default is refused with variable lengths
        "use_cpu_initialization": not capabilities.cuda,
        "deallocate_pipeline_outputs": capabilities.cuda,
        "gradient_accumulation_fusion": choices.gradient_accumulation_fusion,
        "persist_layer_norm": choices.layers == "transformer_engine",
        "bias_activation_fusion": capabilities.cuda,
        "bias_dropout_fusion": capabilities.cuda,
        "masked_softmax_fusion": choices.layers == "transformer_engine",
        "apply_rope_fusion": choices.layers == "transformer_engine",
        **pipeline_fields(layout),
    }
    if spec.is_moe:
        fields |= {
            "moe_grouped_gemm": choices.grouped_gemm,
            "moe_router_dtype": router_dtype,
        }
    if recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute == "selective":
        fields |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    config = (TransformerConfig if spec.mla is None else MLATransformerConfig)(**(fields | overrides))
    for name, value in yarn_attributes(spec).items():
        setattr(config, name, value)
    if splits_biases:
        config.expert_tensor_parallel_size = layout.etp
    return config


def pipeline_fields(layout: Layout) -> dict[str, Any]:
    """Which layers a stage has, and how stages talk.

    Interleaved stages over gloo are silently wrong with batched sends, so they go one by one.
    """
    fields: dict[str, Any] = {}
    if layout.stage_layers is not None and layout.pp > 1:
        stages = [["decoder"] * count for count in layout.stage_layers]
        fields["pipeline_model_parallel_layout"] = [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]
    if layout.vpp is not None:
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return fields


def build_model(
    spec: ModelSpec,
    layout: Layout,
    capabilities: Capabilities,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute | None = None,
    router_dtype: Literal["fp32", "fp64"] = "fp32",
    **overrides: Any,
) -> list[Any]:
    """The `GPTModel` chunks of this rank, one per virtual stage, unwrapped and randomly initialised.

    The parallel state must be that of `layout` (`ParallelRuntime.setup`). Random initialisation differs between
    layouts: load a checkpoint where results must agree. Every MoE layer's `mlp.router.router_replay` is None and is
    consulted in each forward, so that a replay object can be put there.

    The embedding has `spec.padded_vocab_size(tp)` rows; the logits of padding rows are set to a very low number, so
    that no softmax over them sees padding.

    Raises:
        UserError: the model does not fit the layout.
    """
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel

    from moe_asyncrl.train.specs.layers import block_spec

    config = transformer_config(
        spec, layout, capabilities, dtype=dtype, recompute=recompute, router_dtype=router_dtype, **overrides
    )
    chunks = []
    for stage in [None] if layout.vpp is None else range(layout.vpp):
        whole_rank = stage is None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(
                config, capabilities, vp_stage=stage, norms_over_heads=spec.qk_norm_over_heads
            ),
            vocab_size=spec.padded_vocab_size(layout.tp),
            max_sequence_length=spec.max_position_embeddings,
            pre_process=state.is_pipeline_first_stage(ignore_virtual=whole_rank, vp_stage=stage),
            post_process=state.is_pipeline_last_stage(ignore_virtual=whole_rank, vp_stage=stage),
            parallel_output=True,
            share_embeddings_and_output_weights=spec.tie_embeddings,
            vp_stage=stage,
            **position_arguments(spec),
        )
        mask_padding_logits(chunk, spec, layout)
        chunks.append(chunk)
    return chunks


def mask_padding_logits(chunk: Any, spec: ModelSpec, layout: Layout) -> None:
    """Keep the vocabulary's padding rows out of every softmax over the output layer's logits.

    They get half the lowest finite number: its exponential is exactly 0, and products with probability 0 stay 0.
    """
    from megatron.core import parallel_state as state

    rows = spec.padded_vocab_size(layout.tp) // layout.tp
    real = spec.vocab_size - rows * state.get_tensor_model_parallel_rank()
    if not chunk.post_process or real >= rows:
        return

    def mask(_module: Any, _inputs: Any, output: Any) -> Any:
        logits, bias = output
        padding = torch.arange(logits.shape[-1], device=logits.device) >= real
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min / 2), bias

    chunk.output_layer.register_forward_hook(mask)


def wrap_ddp(chunks: list[Any], *, distributed_optimizer: bool = False, overlap: bool = False) -> list[Any]:
    """The chunks inside Megatron-Core's DistributedDataParallel, gradients reduced in float32.

    `overlap` reduces gradients while the backward runs. It also sets the configuration's gradient finaliser, which
    sums what pipeline, tensor and data parallel ranks share and divides by the number of trained tokens.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    config = chunks[0].config
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=overlap
    )
    config.finalize_model_grads_func = finalize_model_grads
    return [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
