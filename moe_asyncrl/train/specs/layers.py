"""The layer factory: Megatron-Core's own layers or Transformer Engine's, from the capability record passed in."""

from __future__ import annotations

from typing import Any

from moe_asyncrl.config.capability import Capabilities, attention_implementation, layer_implementation


def block_spec(
    config: Any, capabilities: Capabilities, *, vp_stage: int | None = None, norms_over_heads: bool = False
) -> Any:
    """`TransformerBlockSubmodules` for this pipeline rank's chunk `vp_stage`.

    With the local layers, core attention is `PortableAttention`; Transformer Engine brings its own. With
    `norms_over_heads`, queries and keys are normalised over all heads together.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=layer_implementation(capabilities) == "transformer_engine",
        normalization=config.normalization,
        vp_stage=vp_stage,
    )
    if attention_implementation(capabilities) == "portable":
        from moe_asyncrl.train.attention import PortableAttention

        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = PortableAttention
    if norms_over_heads:
        from megatron.core.transformer.spec_utils import ModuleSpec

        from moe_asyncrl.train.norm_over_heads import NormOverHeads

        for layer in spec.layer_specs:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = ModuleSpec(module=NormOverHeads, params={"of": "query"})
            attention.k_layernorm = ModuleSpec(module=NormOverHeads, params={"of": "key"})
    return spec
