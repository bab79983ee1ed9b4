"""Weights of many versions out of two models: each tensor lies somewhere on the line between them.

The line is walked element by element, so the same version comes out bit by bit whether it is made of HF tensors, of
Megatron's parameters or of transformers' (which stack, cut and fuse the same elements in other ways).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.engines.models import Reference

LAYERS = 4
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Mix:
    """How far each group of tensors is from the first model to the second; group 0 has no layer, 1 + n layer n."""

    amounts: tuple[float, ...]

    def with_group(self, group: int, other: Mix) -> Mix:
        """One group taken from another mix: weights of two versions at once."""
        return Mix(
            tuple(b if g == group else a for g, (a, b) in enumerate(zip(self.amounts, other.amounts, strict=True)))
        )


def group_of(name: str) -> int:
    """The group of a tensor, by its name in any of the three worlds."""
    found = _LAYER.search(name)
    return 1 + int(found[1]) if found else 0


def mix_of(version: int) -> Mix:
    """Every third version moves one layer only, the others everything; no two neighbours are close."""

    def newest(group: int) -> int:
        return max(
            v for v in range(max(version - 3, 0), version + 1) if v % 3 != 2 or group == 1 + v % LAYERS or v == 0
        )

    return Mix(tuple((0.37 + 0.6180339887 * newest(group) + 0.05 * group) % 1.0 for group in range(1 + LAYERS)))


def between(a: torch.Tensor, b: torch.Tensor, amount: float) -> torch.Tensor:
    """The point on the line."""
    return a + amount * (b - a)


class Mixed:
    """transformers' model with the weights of any mix."""

    def __init__(self, first: Path, second: Path) -> None:
        self.model: Any = Reference(first).model
        self._a = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self._b: Mapping[str, torch.Tensor] = dict(Reference(second).model.named_parameters())
        self._now: Mix | None = None
        self._gates = [m for m in self.model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]
        assert len(self._gates) == LAYERS

    def at(self, mix: Mix) -> Any:
        """The model, with these weights until the next call."""
        if mix != self._now:
            with torch.no_grad():
                for name, value in self.model.named_parameters():
                    value.copy_(between(self._a[name], self._b[name], mix.amounts[group_of(name)]))
            self._now = mix
        return self.model

    @contextmanager
    def routed(self, watch: Any) -> Iterator[None]:
        """`watch(layer, router logits, output)` sees each router's output and may return another one."""
        hooks = [
            gate.register_forward_hook(lambda module, inputs, output, layer=layer: watch(layer, output))
            for layer, gate in enumerate(self._gates)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
