"""Models that the parity tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.models import make, transformers_logits


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, np.ndarray[Any, Any]]]:
    """Directory and transformers' logits of a model, made when first asked for."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, tuple[Path, np.ndarray[Any, Any]]] = {}

    def get(name: str) -> tuple[Path, np.ndarray[Any, Any]]:
        if name not in made:
            directory = make(root, name)
            made[name] = (directory, transformers_logits(directory))
        return made[name]

    return get
