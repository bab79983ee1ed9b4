"""What only some architectures have, one small value each. `ModelSpec` holds them; their defaults say "has it not"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Rotary positions stretched as by YaRN (arXiv 2309.00071)."""

    factor: float
    original_context: int
    """Tokens of context before the stretching."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    """With `mscale_all_dim`: cosines and sines are scaled by the ratio of both; alone or absent: by `factor` only."""
    mscale_all_dim: float | None = None
    """In multi-latent attention it also scales the softmax."""
    rounds_range: bool = True
    """The range of frequencies that are blended is rounded to whole dimensions (`truncate` in HF)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Rotary positions stretched as in Llama 3.1: low frequencies divided by `factor`, high ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


RopeScaling = Yarn | Llama3Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come from one small vector a token."""

    q_rank: int | None
    """Width of the queries' latent vector; None: queries are projected directly."""
    kv_rank: int
    """Width of the latent vector of keys and values."""
    nope_dim: int
    """Elements of each query and key head that no position turns."""
    rope_dim: int
    """Elements of each query and key head that are turned; the key's are shared by all heads."""
    value_dim: int
    """Elements of each value head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How a router turns logits into experts and weights. The defaults are a softmax and nothing else."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    expert_bias: bool = False
    """A bias for each expert takes part in the choice, not in the weights (`e_score_correction_bias` in HF)."""
    groups: int = 1
    """Experts are cut into so many equal groups, and a token's experts come from `groups_per_token` of them."""
    groups_per_token: int = 1
    scale: float = 1.0
    """The weights are multiplied by it at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GluSpec:
    """The gated feed-forward: activation(gate) * (up + offset), gate and up clamped before."""

    activation: Literal["silu", "quick_gelu"] = "silu"
    clamp: float | None = None
    """gate is cut at +clamp, up at ±clamp."""
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpForm:
    """How a checkpoint stores its multi-token-prediction layers. Checkpoints of one architecture differ in it."""

    own_prefix: bool = False
    """Under `mtp.`, with no copies of embedding and output layer, as Qwen3-Next has it; else as more decoder layers."""
    stacked: bool = False
    """All experts of a layer in two tensors, gate over up; else three tensors an expert."""
    copies: bool = True
    """With own copies of the embedding and the output layer. Only without a prefix of their own."""


SOFTMAX = RouterSpec()
SILU = GluSpec()
BEHIND = MtpForm()

Mtp = Literal["unsaid", "drop", "keep"]
"""What is done with multi-token-prediction weights: nobody said (a checkpoint that has some is refused), or a word."""
