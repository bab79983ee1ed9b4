"""The shape of a model, independent of any framework.

A `ModelSpec` is read from a Hugging Face directory and is the only thing that the trainer's layer factory, the
parameter maps, the weight updates and the planner know about a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_asyncrl.models.features import BEHIND, SILU, SOFTMAX, GluSpec, MlaSpec, Mtp, MtpForm, RopeScaling, RouterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer with dense or mixture-of-experts layers.

    Sizes are in elements; layers and experts are counted from 0 over the whole model. What most models have comes
    first; from `rotary_fraction` on, each field's default means that the model does not have it.
    """

    family: str
    """Our name of the architecture family, a key of `moe_asyncrl.models.families.FAMILIES`."""
    architecture: str
    """The HF class, for example `Qwen3MoeForCausalLM`."""
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    """Key/value heads; each serves `num_attention_heads // num_kv_heads` query heads."""
    head_dim: int
    """Of queries and keys; in multi-latent attention the turned and the unturned part together."""
    intermediate_size: int
    """Width of the gated feed-forward of a dense layer."""
    moe_intermediate_size: int
    """Width of one expert's gated feed-forward; 0 in a dense model."""
    num_experts: int
    """Routed experts of each MoE layer; 0 in a dense model."""
    experts_per_token: int
    """Experts that each token is routed to; 0 in a dense model."""
    moe_layers: tuple[bool, ...]
    """One flag a layer: True where the feed-forward is a mixture of experts."""
    vocab_size: int
    """Rows of the embedding as stored in the HF checkpoint, without any padding of ours."""
    max_position_embeddings: int
    """Longest context in tokens."""
    norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    """The output layer reuses the embedding's weight."""
    qk_norm: bool
    """RMSNorm over head_dim on queries and keys before the rotary embedding."""
    norm_topk_prob: bool
    """The chosen experts' probabilities are divided by their sum."""
    attention_bias: bool
    """The q, k and v projections have a bias."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sample; empty where neither config.json nor generation_config.json names one."""
    pad_token_id: int | None
    torch_dtype: str
    """Type the weights are stored in: `float32`, `bfloat16` or `float16`."""
    rotary_fraction: float = 1.0
    """Part of each query and key head, from its start, that positions turn."""
    rope_scaling: RopeScaling | None = None
    """How rotary positions are stretched to longer contexts."""
    qk_norm_over_heads: bool = False
    """`qk_norm` runs over all heads together, not over each head by itself."""
    linear_biases: bool = False
    """Projections, experts and routers have biases; embedding and output layer have none."""
    sliding_window: int | None = None
    """Tokens, its own included, that a token of a windowed layer attends to."""
    windowed_layers: tuple[bool, ...] = ()
    """One flag a layer: True where attention sees only the window; empty without windows."""
    attention_sinks: bool = False
    """Each head has a learned logit that takes part in the softmax and adds nothing to its output."""
    mla: MlaSpec | None = None
    """Multi-latent attention in place of grouped queries."""
    router: RouterSpec = SOFTMAX
    shared_expert_size: int = 0
    """Width of the feed-forward beside the experts that every token of an MoE layer takes."""
    glu: GluSpec = SILU
    mtp_layers: int = 0
    """Multi-token-prediction layers that the config announces behind the last layer. No forward pass uses them."""
    mtp: Mtp = "unsaid"
    """What is done with their weights: see `with_mtp`."""
    mtp_form: MtpForm = BEHIND
    """How the checkpoint stores them, from the names of its tensors."""

    @classmethod
    def from_hf(cls, directory: str | Path) -> ModelSpec:
        """Read `config.json` (and the end-of-sequence ids of `generation_config.json`) of an HF directory.

        Raises:
            UserError: no such directory or file, invalid JSON, an unknown architecture, inconsistent values, or a
                feature that this project does not implement.
        """
        from moe_asyncrl.models.hf_config import read_spec

        return read_spec(Path(directory))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], *, source: str = "config.json") -> ModelSpec:
        """The spec of a parsed `config.json`; `source` names it in error messages. Raises UserError as `from_hf`."""
        from moe_asyncrl.models.hf_config import spec_from_config

        return spec_from_config(config, source=source)

    def with_mtp(self, mtp: Mtp) -> ModelSpec:
        """The same model with a word on its multi-token-prediction weights.

        `drop`: they are not read, and what is written has none. `keep`: they are part of the parameter map.
        """
        return replace(self, mtp=mtp)

    @property
    def kept_mtp_layers(self) -> int:
        """Multi-token-prediction layers that the parameter map holds."""
        return self.mtp_layers if self.mtp == "keep" else 0

    @property
    def is_moe(self) -> bool:
        """True if any layer is a mixture of experts."""
        return any(self.moe_layers)

    @property
    def moe_layer_indices(self) -> tuple[int, ...]:
        """Global numbers of the MoE layers, ascending: row i of a routing log belongs to layer `[i]`."""
        return tuple(i for i, moe in enumerate(self.moe_layers) if moe)

    @property
    def num_moe_layers(self) -> int:
        """Layers that have a router."""
        return sum(self.moe_layers)

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the Megatron embedding: `vocab_size` rounded up to a multiple of the tensor-parallel size.

        The rows at the end are padding: zero, never exported, and their logits must be kept out of every softmax.
        """
        return -(-self.vocab_size // tp) * tp

    def total_parameters(self) -> int:
        """Elements of all distinct weights that the parameter map holds, embedding included (tied weights count once).

        Multi-token-prediction layers count only if they are kept."""
        from moe_asyncrl.models.counts import total_parameters

        return total_parameters(self)

    def active_parameters(self) -> int:
        """Elements that one token's forward reads: everything but the experts it is not routed to."""
        from moe_asyncrl.models.counts import active_parameters

        return active_parameters(self)
