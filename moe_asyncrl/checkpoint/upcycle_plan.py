"""What becomes of each tensor when a dense Llama is made into a Mixtral: names, shapes, draws. No files here.

Method: "Sparse Upcycling" (arXiv 2212.05055): every expert starts as the dense feed-forward. Mixtral divides the
weights of the chosen experts by their sum, so the mixture computes what the dense model did, up to the noise, whatever
its routers say.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.algebra import HfTensor
from moe_asyncrl.models.families.moe_blocks import MIXTRAL_NAMES
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.spec import ModelSpec

MAX_NOISE = 0.1
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "post_attention_layernorm.weight"
_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache")
_EXPERT_MATRIX = dict(zip(("gate_proj", "up_proj", "down_proj"), MIXTRAL_NAMES.gate_up_down, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcycling:
    """How a dense model becomes a mixture. Raises UserError for values that make none."""

    experts: int = 4
    top_k: int = 2
    noise: float = 0.015
    """Standard deviation of what is added to each element of an expert, as a part of its matrix's own."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.experts < 2:
            raise UserError(f"--experts {self.experts}: a mixture has at least 2")
        if not 1 <= self.top_k <= self.experts:
            raise UserError(f"--top-k {self.top_k} is not between 1 and the {self.experts} experts")
        if not 0 < self.noise <= MAX_NOISE:
            raise UserError(
                f"--noise {self.noise} is not above 0 and at most {MAX_NOISE}: without noise all experts are one and "
                "learn the same, with more the model forgets"
            )
        if self.seed < 0:
            raise UserError(f"--seed {self.seed} is negative")


def mixtral_config(spec: ModelSpec, config: Mapping[str, Any], how: Upcycling, source: str) -> dict[str, Any]:
    """The `config.json` of the mixture. `spec` and `config` are the dense model's, `source` names its file in errors.

    The output layer is never tied: SGLang's Mixtral has one of its own. Raises UserError naming the field that a
    Mixtral, as transformers, SGLang and this project read it, cannot have.
    """
    if spec.family != "llama":
        raise UserError(f"{source}: `architectures` names {spec.architecture}: only LlamaForCausalLM can be upcycled")
    if spec.rope_scaling is not None:
        raise UserError(f"{source}: `rope_scaling` is set: a Mixtral has no stretched positions in SGLang")
    if spec.rope_theta != int(spec.rope_theta):
        raise UserError(f"{source}: `rope_theta` {spec.rope_theta} is no whole number: SGLang's Mixtral cuts it to one")
    if spec.head_dim * spec.num_attention_heads != spec.hidden_size:
        raise UserError(
            f"{source}: `head_dim` {spec.head_dim} times {spec.num_attention_heads} heads is not `hidden_size` "
            f"{spec.hidden_size}, as SGLang's Mixtral has it"
        )
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "num_local_experts": how.experts,
        "num_experts_per_tok": how.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.0,
        **{name: config[name] for name in _CARRIED if name in config},
        "torch_dtype": spec.torch_dtype,
    }


@dataclass(frozen=True, slots=True)
class Step:
    """One tensor of the dense model, read once, and the tensors that are made of it."""

    source: HfTensor
    copies: tuple[str, ...] = ()
    noisy: tuple[str, ...] = ()
    router: str | None = None
    """The router whose inputs this norm scales."""


def steps(dense: ModelSpec, how: Upcycling) -> Iterator[Step]:
    """Every tensor of the dense model in export order."""
    for tensor in parameter_map(dense).hf_tensors():
        layer, _, rest = tensor.name.partition(".mlp.")
        if rest:
            matrix = _EXPERT_MATRIX[rest.removesuffix(".weight")]
            experts = (f"{layer}.{MIXTRAL_NAMES.block}experts.{e}.{matrix}.weight" for e in range(how.experts))
            yield Step(tensor, noisy=tuple(experts))
        elif tensor.name.endswith(_NORM):
            router = tensor.name.removesuffix(_NORM) + f"{MIXTRAL_NAMES.block}gate.weight"
            yield Step(tensor, copies=(tensor.name,), router=router)
        elif tensor.name == _EMBEDDING and dense.tie_embeddings:
            yield Step(tensor, copies=(_EMBEDDING, _HEAD))
        else:
            yield Step(tensor, copies=(tensor.name,))


def typed(mixture: ModelSpec, found: Mapping[str, torch.dtype]) -> list[HfTensor]:
    """The mixture's tensors in export order, each in the type of the tensor that it is made of (`found`, by name)."""
    names = {t: str(dtype).removeprefix("torch.") for t, dtype in found.items()}
    return [replace(t, dtype=names.get(t.name)) for t in parameter_map(mixture).hf_tensors()]


def spread_of(weight: torch.Tensor, name: str) -> float:
    """Standard deviation over the whole matrix.

    Raises:
        UserError: the matrix is constant or not finite: no noise would tell its experts apart.
    """
    spread = float(np.std(weight.float().numpy(), dtype=np.float64))
    if not (math.isfinite(spread) and spread > 0):
        raise UserError(f"{name} has a standard deviation of {spread}: experts made of it would not differ")
    # The sum's last bits depend on the machine's vector width; float32 does not have them.
    return float(np.float32(spread))


def noisy_copy(weight: torch.Tensor, spread: float, name: str, how: Upcycling) -> torch.Tensor:
    """weight + noise x spread x N(0, 1) in float32, then in the type of `weight`.

    The draw depends on the seed and on `name`, the expert's own tensor, and on nothing else.
    """
    noise = _normal(tuple(weight.shape), name, how.seed)
    noise *= np.float32(how.noise * spread)
    noise += weight.float().numpy()
    return torch.from_numpy(noise).to(weight.dtype)


def router_weight(norm: torch.Tensor, name: str, how: Upcycling, dtype: torch.dtype) -> torch.Tensor:
    """A router [experts, hidden size] of N(0, 1) / sqrt(hidden size) / rms(norm), for inputs scaled by `norm`.

    RMSNorm's own output has elements near 1 before it is scaled, so logits have a standard deviation near 1 in every
    model: experts are chosen evenly and clearly, and their weights are neither equal nor saturated.

    Raises:
        UserError: the norm is zero or not finite.
    """
    size = math.sqrt(float(np.square(norm.float().numpy(), dtype=np.float64).sum()))
    if not (math.isfinite(size) and size > 0):
        raise UserError(f"{name}: the norm before it has a length of {size}")
    drawn = _normal((how.experts, len(norm)), name, how.seed)
    return torch.from_numpy(drawn * np.float32(1 / np.float32(size))).to(dtype)


def _normal(shape: tuple[int, ...], name: str, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Standard normal float32 by seed and name. By numpy: torch's bits depend on the machine's vector width."""
    key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return generator.standard_normal(shape, dtype=np.float32)
