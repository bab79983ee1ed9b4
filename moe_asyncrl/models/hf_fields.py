"""Typed access to the fields of an HF config, with errors that name the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.quantization import LOGICAL_DTYPE, read_quantization

_REQUIRED: Any = object()
_DTYPES = ("float32", "bfloat16", "float16")


class HfFields:
    """A parsed HF config and the file it came from. Every method raises UserError naming both."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def fail(self, message: str) -> UserError:
        """The error to raise for `message`, prefixed with the file."""
        return UserError(f"{self.source}: {message}")

    def integer(self, *names: str, minimum: int = 1, default: int = _REQUIRED) -> int:
        """An integer of at least `minimum`, under the first of `names` that is set (spellings differ by version)."""
        name, value = self._first(names)
        if value is None:
            if default is _REQUIRED:
                raise self.fail(f"`{names[0]}` is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(f"`{name}` must be an integer of at least {minimum}, found {value!r}")
        return value

    def number(self, *names: str, default: float = _REQUIRED) -> float:
        """A positive number."""
        name, value = self._first(names)
        if value is None:
            if default is _REQUIRED:
                raise self.fail(f"`{names[0]}` is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.fail(f"`{name}` must be a positive number, found {value!r}")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"`{name}` must be true or false, found {value!r}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers; empty where the field is absent or null."""
        value = self.config.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self.fail(f"`{name}` must be a list of integers, found {value!r}")
        return tuple(value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Token ids given as one integer or a list; empty where absent."""
        value = self.config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            ids: tuple[int, ...] = (value,)
        else:
            ids = self.integers(name)
        for token in ids:
            if not 0 <= token < vocab_size:
                raise self.fail(f"`{name}` {token} is outside the vocabulary of {vocab_size}")
        return ids

    def torch_dtype(self) -> str:
        """The type of the weights: `dtype` (transformers 5) or `torch_dtype` (before).

        Where absent it is `float32`, or what quantised weights are read as.
        """
        name, value = self._first(("dtype", "torch_dtype"))
        quantized = bool(self.config.get("quantization_config"))
        if value is None or (quantized and value == "float8_e4m3fn"):
            return LOGICAL_DTYPE if quantized else "float32"
        if value not in _DTYPES:
            raise self.fail(f"`{name}` {value!r} is not one of {', '.join(_DTYPES)}")
        return str(value)

    def refuse_unsupported(self, *, windows: bool = False) -> None:
        """Raise if the config asks for something that would be computed wrongly if it were ignored.

        `windows`: the family reads sliding windows itself. Rotary positions are `hf_rope`'s to judge.
        """
        config = self.config
        read_quantization(config, self.fail)
        if config.get("use_sliding_window"):
            raise self.fail("`use_sliding_window` is true: sliding-window attention is not supported")
        layer_types = config.get("layer_types") or []
        other = sorted({str(t) for t in layer_types} - {"full_attention"})
        if other and not windows:
            raise self.fail(f"`layer_types` has {', '.join(other)}: only full_attention is supported")
        if config.get("hidden_act", "silu") != "silu":
            raise self.fail(f"`hidden_act` {config['hidden_act']!r} is not supported: only 'silu' is")
        if config.get("attention_dropout"):
            raise self.fail(f"`attention_dropout` {config['attention_dropout']} is not supported: only 0 is")

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        found = [(name, self.config[name]) for name in names if self.config.get(name) is not None]
        if len(found) > 1 and found[0][1] != found[1][1]:
            raise self.fail(f"`{found[0][0]}` is {found[0][1]!r} but `{found[1][0]}` is {found[1][1]!r}")
        return found[0] if found else (names[0], None)
