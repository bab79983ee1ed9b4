"""Text to token ids and back, by the tokenizer of an HF directory: the one place where a prompt becomes tokens.

Sampling and supervised learning both use it, so that a model is trained on the very ids that it is sampled with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from moe_asyncrl.data.errors import UserError, first_line
from moe_asyncrl.data.prompts import Prompt
from moe_asyncrl.models.spec import ModelSpec

Chat = Literal["auto", "never"]


GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that read `tokenizer.json` and add nothing to it."""


def _loader(directory: Path) -> Any:
    """transformers' class that loads the tokenizer of a directory.

    That is `AutoTokenizer`. Where the tokenizer's own configuration names the generic class, `AutoTokenizer` takes it,
    after five seconds in which it imports the code of models; then we take it at once.
    """
    import transformers

    try:
        config = json.loads((directory / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        config = {}
    generic = isinstance(config, dict) and config.get("tokenizer_class") in GENERIC and "auto_map" not in config
    return transformers.PreTrainedTokenizerFast if generic else transformers.AutoTokenizer


class Tokenizer:
    """A loaded tokenizer. Make it with `Tokenizer.load`."""

    def __init__(self, inner: Any, *, directory: Path, eos_ids: tuple[int, ...], vocab_size: int) -> None:
        self._inner = inner
        self.directory = directory
        self.eos_ids = eos_ids
        """Ids that end a sample, the first one being the one that an answer is closed with in supervised learning."""
        self._vocab_size = vocab_size

    @classmethod
    def load(cls, directory: str | Path, spec: ModelSpec | None = None) -> Tokenizer:
        """Load the tokenizer of an HF directory. Imports transformers: seconds.

        Raises:
            UserError: the directory has no tokenizer that can be loaded, or no id ends a sample.
        """
        directory = Path(directory)
        spec = ModelSpec.from_hf(directory) if spec is None else spec
        if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise UserError(f"{directory}: no tokenizer there (tokenizer.json, tokenizer.model or vocab.json)")
        try:
            inner = _loader(directory).from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        except Exception as e:  # transformers and tokenizers raise all kinds, bare ones included
            raise UserError(f"{directory}: the tokenizer cannot be loaded: {first_line(e)}") from e
        eos = spec.eos_token_ids or (() if inner.eos_token_id is None else (int(inner.eos_token_id),))
        if not eos:
            raise UserError(f"{directory}: neither config.json nor the tokenizer names an end-of-sequence token")
        return cls(inner, directory=directory, eos_ids=tuple(eos), vocab_size=spec.vocab_size)

    def encode_prompt(self, prompt: Prompt, chat: Chat = "auto") -> list[int]:
        """Ids that sampling starts from.

        `prompt` text is encoded as it stands, with the special tokens that the tokenizer itself puts around a text.
        `messages` are rendered by the chat template, up to where the assistant begins; with `chat` "never" their
        contents are joined by newlines and encoded as text.

        Raises:
            UserError: names the prompt: no chat template, a template that fails, no token, or an id outside the
                model's vocabulary.
        """
        if prompt.messages is not None and chat == "auto":
            ids = self._rendered(prompt)
        else:
            ids = list(self._inner.encode(prompt.text))
        if not ids:
            raise UserError(f"{prompt.source}: the prompt has no token")
        return self._checked(ids, prompt.source)

    def encode_answer(self, answer: str, source: str, *, close: bool = True) -> list[int]:
        """Ids of an answer that follows a prompt, closed by the first end-of-sequence id. Raises UserError as above."""
        ids = list(self._inner.encode(answer, add_special_tokens=False))
        return self._checked([*ids, self.eos_ids[0]] if close else ids, source)

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Text of the ids; special tokens are left out unless `keep_special`."""
        return str(self._inner.decode(list(ids), skip_special_tokens=not keep_special))

    def _rendered(self, prompt: Prompt) -> list[int]:
        if not getattr(self._inner, "chat_template", None):
            raise UserError(
                f"{prompt.source}: `messages` need a chat template and {self.directory} has none; "
                "give `prompt`, or set data.chat to never"
            )
        try:
            text = self._inner.apply_chat_template(
                list(prompt.messages or ()), add_generation_prompt=True, tokenize=False
            )
        except Exception as e:  # a template is a program of the model's author
            raise UserError(f"{prompt.source}: the chat template fails: {first_line(e)}") from e
        return list(self._inner.encode(text, add_special_tokens=False))

    def _checked(self, ids: list[int], source: str) -> list[int]:
        if ids and max(ids) >= self._vocab_size:
            raise UserError(f"{source}: token id {max(ids)} is outside the model's vocabulary of {self._vocab_size}")
        return ids
