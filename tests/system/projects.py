"""Folders of users: a model, prompts, a recipe and perhaps a reward function. Nothing in them comes from our tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
import yaml

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-*/=?., "
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<user>", "<assistant>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

REWARDS = '''
"""Rewards from 1 to 2: a failure that was taken for a reward of 0 would show in the mean."""
import asyncio
import os
import zlib
from pathlib import Path

CALLS = Path(__file__).with_name("calls.txt")


async def by_metadata(prompt, completion, answer, metadata):
    assert metadata["tags"] == ["sums", metadata["level"]] and answer == str(eval(prompt.removesuffix("=?")))
    what = ("raises", "hangs", "nan", *["scores"] * 9)[zlib.crc32(completion.encode()) % 12]
    with CALLS.open("a") as f:
        f.write(f"{what}\\n")
    if what == "raises":
        raise ValueError("I do not like this one")
    if what == "hangs":
        await asyncio.sleep(3600)
    if what == "nan":
        return float("nan")
    # Letters that about half of all are: a run in which every group's rewards are equal would learn nothing.
    liked = sum(c in "abcdefghijklmnopqr" for c in completion)
    return {"total": 1 + liked / 100 + metadata["level"] / 1000, "letters": len(completion)}


def always_fails(prompt, completion, answer, metadata):
    raise RuntimeError("the judge is down")


def some_letters(prompt, completion, answer, metadata):
    with CALLS.open("a") as f:
        f.write(f"{metadata['id']}\\n")
    return sum(c in "abc" for c in completion) / 10
'''


def make_model(path: Path, *, layers: int = 2, seed: int = 0) -> Path:
    """A Qwen3-MoE and its tokenizer, both written by transformers."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL[4:]),
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sums(n: int, first: int = 1) -> list[dict[str, Any]]:
    """Chat prompts with an answer and metadata."""
    return [
        {
            "messages": [{"role": "user", "content": f"{i}+{i % 7}=?"}],
            "answer": i + i % 7,
            "level": i % 3,
            "tags": ["sums", i % 3],
            "id": i - first,
        }
        for i in range(first, first + n)
    ]


def recipe(**sections: dict[str, Any]) -> dict[str, Any]:
    """A small recipe; `sections` are laid over it field by field."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "mine", "steps": 4},
        "model": {"path": "model", "max_context": 64},
        "data": {"train": "train.jsonl"},
        "rollout": {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 6, "concurrent_groups": 8},
        "reward": {"function": "rewards:some_letters"},
        "optimizer": {"lr": 1.0e-3},
        "engine": {"max_running_requests": 32, "max_total_tokens": 8192, "restarts": 0},
        "replay": {"probe_every": 0},
        "eval": {"every": 0},
        "weights": {"bucket_mib": 1},
    }
    for name, fields in sections.items():
        base[name] = {**base.get(name, {}), **fields}
    return base


def make_project(folder: Path, model: Path | None = None, *, prompts: int = 40, **sections: dict[str, Any]) -> Path:
    """A folder to run in: `recipe.yaml`, `train.jsonl`, `rewards.py`, and a model or a link to one."""
    folder.mkdir(parents=True, exist_ok=True)
    if model is None:
        make_model(folder / "model")
    else:
        (folder / "model").symlink_to(model)
    write_lines(folder / "train.jsonl", sums(prompts))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(**sections)))
    return folder
