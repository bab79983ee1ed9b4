"""gpt-oss: biases everywhere, attention sinks, every other layer windowed, experts stacked, transposed and interleaved.

A checkpoint keeps all experts of a layer in one tensor, input size first, and gate and up as alternating columns. The
published MXFP4 form is read as this one (`checkpoint.formats.mxfp4`).

Reference: `GptOssForCausalLM` of transformers; arXiv 2508.10925, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_asyncrl.models.algebra import Copy, HfTensor, Stack, View
from moe_asyncrl.models.families import blocks, common
from moe_asyncrl.models.families.family import Family
from moe_asyncrl.models.families.moe_blocks import expert_entry
from moe_asyncrl.models.features import GluSpec
from moe_asyncrl.models.hf_fields import HfFields
from moe_asyncrl.models.hf_rope import read_rope
from moe_asyncrl.models.parameter_map import Entry
from moe_asyncrl.models.spec import ModelSpec


def read_spec(fields: HfFields) -> ModelSpec:
    """The spec of a gpt-oss config."""
    layers = fields.integer("num_hidden_layers")
    if not fields.boolean("attention_bias", default=True):
        raise fields.fail("`attention_bias` is false: gpt-oss without biases is not supported")
    if fields.number("swiglu_alpha", default=1.702) != 1.702:
        raise fields.fail(f"`swiglu_alpha` {fields.config['swiglu_alpha']} is not supported: only 1.702 is")
    types = fields.config.get("layer_types")
    if types is None:
        types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise fields.fail(f"`layer_types` must name full_attention or sliding_attention for each of {layers} layers")
    return ModelSpec(
        family=FAMILY.name,
        architecture=FAMILY.architecture,
        norm_topk_prob=True,
        qk_norm=False,
        attention_bias=True,
        linear_biases=True,
        attention_sinks=True,
        sliding_window=fields.integer("sliding_window", default=128),
        windowed_layers=tuple(kind == "sliding_attention" for kind in types),
        glu=GluSpec(activation="quick_gelu", clamp=fields.number("swiglu_limit", default=7.0), offset=1.0),
        **common.experts_everywhere(fields),
        **common.grouped_queries(fields, default_head_dim=64),
        **common.sizes(fields, context=131072, eps=1e-5),
        **read_rope(fields, theta=150000.0, kinds=("yarn",)),
    )


def entries(spec: ModelSpec) -> Iterator[Entry]:
    """Parameters in export order."""
    yield from blocks.embedding(spec)
    for layer in range(spec.num_layers):
        at = blocks.decoder_layer(layer)
        yield from blocks.attention(spec, at)
        yield from _moe(spec, at)
    yield from blocks.head(spec)


def _moe(spec: ModelSpec, at: blocks.At) -> Iterator[Entry]:
    experts, hidden, width = spec.num_experts, spec.hidden_size, spec.moe_intermediate_size
    yield from blocks.pre_mlp_norm(spec, at, dense=False)
    for kind, columns in (("weight", (hidden,)), ("bias", ())):
        yield Entry(
            name=f"{at.mine}mlp.router.{kind}",
            op=Copy(HfTensor(f"{at.theirs}mlp.router.{kind}", (experts, *columns))),
            layer=at.layer,
        )
    prefix = at.theirs + "mlp.experts."
    gate_up = HfTensor(prefix + "gate_up_proj", (experts, hidden, 2 * width))
    gate_up_bias = HfTensor(prefix + "gate_up_proj_bias", (experts, 2 * width))
    down = HfTensor(prefix + "down_proj", (experts, width, hidden))
    down_bias = HfTensor(prefix + "down_proj_bias", (experts, hidden))
    for e in range(experts):
        rows = tuple(View(tensor=gate_up, index=e, transposed=True, first=first, step=2) for first in (0, 1))
        yield expert_entry(at, e, "linear_fc1", "weight", Stack(rows), 0)
    for e in range(experts):
        rows = tuple(View(tensor=gate_up_bias, index=e, first=first, step=2) for first in (0, 1))
        yield expert_entry(at, e, "linear_fc1", "bias", Stack(rows), 0)
    for e in range(experts):
        yield expert_entry(at, e, "linear_fc2", "weight", Copy(View(tensor=down, index=e, transposed=True)), 1)
    for e in range(experts):
        yield expert_entry(at, e, "linear_fc2", "bias", Copy(View(tensor=down_bias, index=e)), None)


FAMILY = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    read_spec=read_spec,
    entries=entries,
    windows=True,
    tiny_config={
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": None,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
    },
)
