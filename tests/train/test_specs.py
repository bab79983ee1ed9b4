"""From a ModelSpec to Megatron-Core: configuration fields, layer classes, and the model that comes out."""

from __future__ import annotations

import pytest

from moe_asyncrl.config.capability import Capabilities
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.specs import config_fields
from tests.pool.pool import WorkerPool
from tests.train.parity_jobs import tiny_spec

GPU = Capabilities(cuda=True, gpu_count=8, nccl=True, transformer_engine=True, grouped_gemm=True)


def test_sizes_and_norms_come_from_the_spec() -> None:
    fields = config_fields(tiny_spec(attention_bias=True, qk_norm=False, norm_eps=1e-5))
    assert fields["num_query_groups"] == 2
    assert fields["kv_channels"] == 16
    assert fields["ffn_hidden_size"] == 96
    assert fields["moe_ffn_hidden_size"] == 32
    assert fields["moe_layer_freq"] == [0, 1, 1, 1]
    assert fields["layernorm_epsilon"] == 1e-5
    assert fields["add_qkv_bias"]
    assert not fields["qk_layernorm"]


@pytest.mark.parametrize("divided", [True, False])
def test_the_router_divides_by_the_sum_of_the_chosen_only_if_the_model_does(divided: bool) -> None:
    assert config_fields(tiny_spec(norm_topk_prob=divided))["moe_router_pre_softmax"] is not divided


def test_a_dense_model_has_no_router() -> None:
    spec = tiny_spec(family="qwen3", num_experts=0, experts_per_token=0, moe_layers=(False,) * 4)
    assert not any(name.startswith("moe") or "expert" in name for name in config_fields(spec))


def test_what_cannot_be_expressed_is_refused() -> None:
    with pytest.raises(UserError, match="experts_per_token is 1"):
        config_fields(tiny_spec(experts_per_token=1))
    with pytest.raises(UserError, match=r"knows only deepseek_v3, .*qwen3_moe"):
        config_fields(tiny_spec(family="unheard_of"))


def test_experts_with_biases_are_split_only_where_their_sum_is_mended() -> None:
    from moe_asyncrl.train.model import transformer_config

    spec = tiny_spec(family="gpt_oss", linear_biases=True)
    with pytest.raises(UserError, match="Transformer Engine's layers would add each of them 2 times under etp 2"):
        transformer_config(spec, Layout(tp=2), GPU)


LOCAL = {
    "input_layernorm": "WrappedTorchNorm",
    "linear_qkv": "ColumnParallelLinear",
    "linear_proj": "RowParallelLinear",
    "core_attention": "PortableAttention",
    "experts": "SequentialMLP",
}
TRANSFORMER_ENGINE = {
    "input_layernorm": "IdentityOp",
    "linear_qkv": "TELayerNormColumnParallelLinear",
    "linear_proj": "TERowParallelLinear",
    "core_attention": "TEDotProductAttention",
    "experts": "TEGroupedMLP",
}


@pytest.mark.parametrize(
    ("machine", "expected"), [(Capabilities(), LOCAL), (GPU, TRANSFORMER_ENGINE)], ids=["cpu", "gpu"]
)
def test_the_factory_returns_the_layers_of_the_machine_passed_in(
    machine: Capabilities, expected: dict[str, str], pool: WorkerPool
) -> None:
    (found,) = pool.run("tests.train.spec_jobs:layer_classes", machine=machine)
    assert found == expected


def test_the_configuration_carries_the_choices(pool: WorkerPool) -> None:
    (fields,) = pool.run("tests.train.spec_jobs:built_config", layout=Layout(), recompute="full")
    assert fields == {
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": "fp32",
        "moe_enable_routing_replay": False,
        "recompute_granularity": "full",
        "sequence_parallel": False,
        "params_dtype": "torch.float32",
        "rotary_base": 5e5,
    }


def test_tensor_parallelism_brings_sequence_parallelism(pool: WorkerPool) -> None:
    found = pool.run("tests.train.spec_jobs:built_config", layout=Layout(tp=2))
    assert all(fields["sequence_parallel"] for fields in found)


@pytest.mark.parametrize("recompute", [None, "full"])
def test_routers_consult_a_replay_object(recompute: str | None, pool: WorkerPool) -> None:
    """Each MoE layer's router asks the object put into `router_replay`, and its answer decides the experts."""
    (answer,) = pool.run("tests.train.spec_jobs:routed_by_replay", recompute=recompute)
    calls, chosen = answer
    assert calls == (6 if recompute else 3)
    assert chosen == [[0, 7]] * 3


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_of_padding_rows_vanish_in_a_softmax(tp: int, pool: WorkerPool) -> None:
    layout = Layout(tp=tp)
    found = pool.run("tests.train.spec_jobs:padding_probability", layout=layout, vocab_size=259)
    assert [rows for rows, _ in found] == [0] * (tp - 1) + [tp - 1]
    assert all(mass == 0 for _, mass in found)
