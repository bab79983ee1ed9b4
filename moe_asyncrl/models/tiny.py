"""Small random checkpoints with a tokenizer: a model to test with, and a start for a training run on a laptop.

The directory is an ordinary Hugging Face one: transformers, SGLang and our own trainer read it like any other.
"""

from __future__ import annotations

import difflib
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.algebra import HfTensor
from moe_asyncrl.models.families import family_named
from moe_asyncrl.models.out_place import check_free
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny_tokenizer import BOS, EOS, PAD, Alphabet, token_list, write_tokenizer

_NORM_SPREAD = 0.25
_LOGIT_SPREAD = 2.0


def make_tiny_model(
    out_dir: str | Path,
    family: str,
    seed: int,
    *,
    init_std: float | None = 0.02,
    alphabet: Alphabet = "bytes",
    tie_embeddings: bool = False,
    dtype: str = "float32",
    **overrides: Any,
) -> ModelSpec:
    """Write a random model of `family` to the new directory `out_dir` and return its spec. Same arguments, same bytes.

    Args:
        init_std: standard deviation of every matrix, with norms at one: a start for training. None makes a model for
            comparisons instead: logits with a standard deviation near 2, experts, norms and routers that differ.
        alphabet: `bytes` covers any text; `ascii` only printable ASCII and the newline, for a smaller vocabulary.
        overrides: fields of the HF config, for example `num_hidden_layers=5` or `vocab_size=300`.

    Raises:
        UserError: unknown family or field, values that do not fit together, a directory that is not empty.
    """
    out = Path(out_dir)
    check_free(out)
    tokens = token_list(alphabet)
    chosen = family_named(family)
    config: dict[str, Any] = {
        "architectures": [chosen.architecture],
        **chosen.tiny_config,
        "vocab_size": len(tokens),
        "tie_word_embeddings": tie_embeddings,
        "pad_token_id": tokens.index(PAD),
        "bos_token_id": tokens.index(BOS),
        "eos_token_id": tokens.index(EOS),
        "initializer_range": init_std or 0.02,
        "torch_dtype": dtype,
    }
    for name, value in overrides.items():
        if name not in config:
            near = difflib.get_close_matches(name, config, n=1)
            raise UserError(f"{family} has no config field {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
        config[name] = value
    spec = ModelSpec.from_hf_config(config, source=f"tiny {family} model")
    if spec.vocab_size < len(tokens):
        raise UserError(f"vocab_size {spec.vocab_size} is too small for {len(tokens)} tokens (alphabet {alphabet})")
    partial = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.partial-"))
    try:
        _write_json(partial / "config.json", config)
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(partial / "generation_config.json", ids)
        write_tokenizer(partial, alphabet, spec.max_position_embeddings)
        save_file(random_weights(spec, seed, init_std), partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "model.safetensors").chmod(0o644)
        partial.chmod(0o755)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return spec


def random_weights(spec: ModelSpec, seed: int, init_std: float | None) -> dict[str, torch.Tensor]:
    """Every HF tensor of the model by name, in the spec's dtype, drawn as `make_tiny_model` says."""
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, spec.torch_dtype)
    return {
        tensor.name: _draw(tensor, generator, init_std).to(getattr(torch, tensor.dtype) if tensor.dtype else dtype)
        for tensor in parameter_map(spec).hf_tensors()
    }


def _draw(tensor: HfTensor, generator: torch.Generator, init_std: float | None) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    if tensor.name.endswith("norm.weight"):
        return torch.ones(tensor.shape) if init_std is not None else 1 + _NORM_SPREAD * noise
    if init_std is not None:
        return init_std * noise
    # Unit variance through each matrix keeps activations of order one at any width. Stacks have the input size first.
    width = tensor.shape[-2] if len(tensor.shape) == 3 else tensor.shape[-1]
    return noise * (_LOGIT_SPREAD / math.sqrt(width))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
