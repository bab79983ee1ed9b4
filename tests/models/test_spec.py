"""Reading a config.json: both spellings, counts, and every refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.spec import ModelSpec

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_a_published_config() -> None:
    spec = ModelSpec.from_hf_config(QWEN3_30B_A3B)
    assert (spec.family, spec.num_moe_layers) == ("qwen3_moe", 48)
    assert (spec.rope_theta, spec.torch_dtype, spec.eos_token_ids) == (1e6, "bfloat16", (151645,))
    # "30.5B in total and 3.3B activated" is what the model's authors publish.
    assert spec.total_parameters() == 30_532_122_624
    assert round(spec.active_parameters() / 1e9, 1) == 3.4
    assert spec.padded_vocab_size(8) == 151936
    assert spec.padded_vocab_size(5) == 151940


def test_the_spelling_of_transformers_5_means_the_same() -> None:
    newer = {
        k: v for k, v in QWEN3_30B_A3B.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype", "num_experts")
    }
    newer |= {
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "dtype": "bfloat16",
        "num_local_experts": 128,
    }
    assert ModelSpec.from_hf_config(newer) == ModelSpec.from_hf_config(QWEN3_30B_A3B)


def test_dense_layers_among_experts() -> None:
    spec = ModelSpec.from_hf_config(
        QWEN3_30B_A3B | {"num_hidden_layers": 6, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    )
    assert spec.moe_layers == (False, True, False, False, False, True)
    assert spec.moe_layer_indices == (1, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen3MoeForCasualLM"]}, "unknown architecture .*did you mean Qwen3MoeForCausalLM"),
        (
            {"architectures": ["T5Model"]},
            "unknown architecture 'T5Model'. Supported: DeepseekV3ForCausalLM, .*Qwen3Moe",
        ),
        ({"architectures": []}, "must name exactly one class"),
        ({"hidden_size": None}, "`hidden_size` is missing"),
        ({"hidden_size": "2048"}, "`hidden_size` must be an integer of at least 1, found '2048'"),
        ({"num_key_value_heads": 5}, "`num_attention_heads` 32 is not a multiple of `num_key_value_heads` 5"),
        ({"head_dim": 127}, "`head_dim` 127 is odd"),
        ({"num_experts_per_tok": 129}, "`num_experts_per_tok` 129 is more than the 128 experts"),
        ({"num_local_experts": 64}, "`num_experts` is 128 but `num_local_experts` is 64"),
        ({"mlp_only_layers": [48]}, "`mlp_only_layers` names layer 48 of a model of 48 layers"),
        ({"mlp_only_layers": list(range(48))}, "leave no mixture-of-experts layer"),
        ({"rms_norm_eps": 0}, "`rms_norm_eps` must be a positive number"),
        ({"eos_token_id": 151936}, "`eos_token_id` 151936 is outside the vocabulary of 151936"),
        ({"norm_topk_prob": "yes"}, "`norm_topk_prob` must be true or false"),
        ({"torch_dtype": "float8_e4m3fn"}, "`torch_dtype` 'float8_e4m3fn' is not one of"),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            "method 'awq': only fp8 .* and mxfp4 are",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "`quantization_config.weight_block_size` is None"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "`quantization_config.fmt` 'e5m2' is not"),
        (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
            "`quantization_config.activation_scheme` 'static' is not supported: only dynamic is",
        ),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding-window attention is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "`layer_types` has sliding_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "`rope_scaling` asks for 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "`rope_scaling` asks for 'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6}}, "`rope_parameters` asks for 'dynamic'"),
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            "`rope_theta` is 1000000.0 but `rope_parameters.rope_theta` is 10000.0",
        ),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` 0.5 is not supported"),
        ({"hidden_act": "gelu"}, "`hidden_act` 'gelu' is not supported"),
        ({"attention_bias": True}, "`attention_bias` is true"),
        ({"attention_dropout": 0.1}, "`attention_dropout` 0.1 is not supported"),
    ],
)
def test_what_cannot_be_computed_rightly_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ModelSpec.from_hf_config(QWEN3_30B_A3B | change, source="here/config.json")
    assert str(caught.value).startswith("here/config.json: ")
    assert "\n" not in str(caught.value)


def test_a_directory_is_checked_before_its_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        ModelSpec.from_hf(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"config\.json does not exist: is .* a Hugging Face model directory"):
        ModelSpec.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not valid JSON: .*line 1"):
        ModelSpec.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"must hold a JSON object, found list"):
        ModelSpec.from_hf(tmp_path)


def test_generation_config_names_the_tokens_that_end_a_sample(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    assert ModelSpec.from_hf(tmp_path).eos_token_ids == (151645,)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [151645, 151643], "pad_token_id": 151643})
    )
    spec = ModelSpec.from_hf(tmp_path)
    assert (spec.eos_token_ids, spec.pad_token_id) == ((151645, 151643), 151643)


def test_reading_a_spec_does_not_import_torch(tmp_path: Path) -> None:
    """In a process of its own: this one has torch loaded already."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    code = (
        "import sys; from moe_asyncrl.models.spec import ModelSpec; "
        f"ModelSpec.from_hf({str(tmp_path)!r}).active_parameters(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
