"""Small random models are ordinary HF directories, the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny import make_tiny_model, random_weights


def contents(directory: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_tiny_model(tmp_path / name, "qwen3_moe", seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    differing = {n for n, data in contents(tmp_path / "c").items() if data != contents(tmp_path / "a")[n]}
    assert differing == {"model.safetensors"}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_it_whole(family: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = make_tiny_model(tmp_path / "m", family, 0, init_std=None, tie_embeddings=tied, dtype="bfloat16")
    assert spec == ModelSpec.from_hf(tmp_path / "m")
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(loading.values())
    assert type(model).__name__ == spec.architecture
    assert model.dtype == torch.bfloat16
    assert model.num_parameters() == spec.total_parameters()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert (tokenizer.eos_token_id,) == spec.eos_token_ids
    assert tokenizer.pad_token_id == spec.pad_token_id
    text = "12 + 30 = 42\n\té ∑ <|eos|"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert chat == "<|bos|><|system|>a<|eos|><|user|>b<|eos|><|assistant|>"
    assert len(tokenizer(chat, add_special_tokens=False).input_ids) == 8


def test_comparison_weights_spread_the_logits_and_training_weights_do_not(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(0, 260, (2, 50), generator=torch.Generator().manual_seed(0))
    spread = {}
    for name, std in (("comparison", None), ("training", 0.02)):
        make_tiny_model(tmp_path / name, "qwen3_moe", 0, init_std=std)
        with torch.no_grad():
            spread[name] = float(AutoModelForCausalLM.from_pretrained(tmp_path / name)(tokens).logits.std())
    assert spread["comparison"] > 1 > 0.5 > spread["training"]


def test_experts_and_norms_differ_in_comparison_weights(tmp_path: Path) -> None:
    weights = random_weights(make_tiny_model(tmp_path / "m", "qwen3_moe", 0, init_std=None), 0, None)
    down = [weights[f"model.layers.0.mlp.experts.{e}.down_proj.weight"] for e in range(8)]
    assert min(float((a - b).abs().max()) for i, a in enumerate(down) for b in down[:i]) > 0.1
    norms = [v for name, v in weights.items() if name.endswith("norm.weight")]
    assert min(float(v.std()) for v in norms) > 0.1


def test_the_ascii_alphabet_is_smaller_and_marks_what_it_lacks(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    spec = make_tiny_model(tmp_path / "m", "qwen3_moe", 0, alphabet="ascii")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert spec.vocab_size == len(tokenizer) == 104
    assert tokenizer.decode(tokenizer("What is 7 + 5?\n~").input_ids) == "What is 7 + 5?\n~"
    assert set(tokenizer("é").input_ids) == {tokenizer.unk_token_id}


def test_bad_input(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    with pytest.raises(UserError, match="exists and is not an empty directory"):
        make_tiny_model(tmp_path / "full", "qwen3", 0)
    with pytest.raises(UserError, match=r"unknown model family 'qwen4'; supported: .*, qwen3, qwen3_moe"):
        make_tiny_model(tmp_path / "m", "qwen4", 0)
    with pytest.raises(UserError, match="no config field 'num_expert'; did you mean num_experts"):
        make_tiny_model(tmp_path / "m", "qwen3_moe", 0, num_expert=4)
    with pytest.raises(UserError, match="vocab_size 100 is too small for 264 tokens"):
        make_tiny_model(tmp_path / "m", "qwen3", 0, vocab_size=100)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
