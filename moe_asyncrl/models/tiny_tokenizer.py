"""The tokenizer of small random models: one token a byte, a few role marks, and a chat template of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Alphabet = Literal["bytes", "ascii"]

PAD, BOS, EOS, UNK = "<|pad|>", "<|bos|>", "<|eos|>", "<|unk|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (PAD, BOS, EOS, UNK, *(f"<|{role}|>" for role in ROLES))

# Every message is its role's mark, its text and the end-of-sequence token, which is also what ends a sample.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def token_list(alphabet: Alphabet) -> list[str]:
    """The vocabulary in id order: special tokens, then byte symbols."""
    return [*SPECIAL, *_symbols(alphabet)]


def write_tokenizer(directory: Path, alphabet: Alphabet, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`. `max_length` in tokens."""
    vocabulary = {token: i for i, token in enumerate(token_list(alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNK,
        "additional_special_tokens": list(SPECIAL[4:]),
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _symbols(alphabet: Alphabet) -> list[str]:
    every = _byte_symbols()
    if alphabet == "bytes":
        return list(every.values())
    return [every[byte] for byte in (10, *range(32, 127))]


def _byte_symbols() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2, `encoder.py`)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return {byte: chr(byte if byte in printable else next(spare)) for byte in range(256)}
