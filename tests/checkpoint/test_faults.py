"""Faults that shapes and round trips do not tell, each provoked.

Elsewhere: gate and up changed places, regrouped queries, a transposed square matrix of attention (test_parity,
test_families); multi-token-prediction layers in two forms, half of either (test_mtp); tied output weights over two and
four pipeline stages (test_parity), padded vocabulary rows (test_export).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import Entry, parameter_map
from moe_asyncrl.models.shards import entry_owners
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny import make_tiny_model
from moe_asyncrl.weights import gather_plan
from moe_asyncrl.weights.gather import pack, place
from tests.checkpoint.families import FAMILY_MODELS
from tests.checkpoint.models import changed_copy, relative, transformers_logits
from tests.checkpoint.parity import CONVERT, TOLERANCE, check_conversion
from tests.models.test_shards import local_parameters, numbered
from tests.pool.pool import WorkerPool

SINGLE = Layout()
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{which}_proj" for which in ("gate_up", "down"))


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray[Any, Any]]:
    """A gpt-oss with experts as wide as its hidden size, as the published ones are: a transpose shows in no shape."""
    directory = tmp_path_factory.mktemp("square") / "m"
    family, fields = FAMILY_MODELS["gpt-oss"]
    make_tiny_model(
        directory, family, 5, init_std=None, alphabet="ascii", **{**fields, "intermediate_size": fields["hidden_size"]}
    )
    return directory, transformers_logits(directory)


def test_square_experts_compute_what_they_do_in_transformers(
    square: tuple[Path, np.ndarray[Any, Any]], pool: WorkerPool, tmp_path: Path
) -> None:
    check_conversion(pool, Layout(dp=2, ep=2), *square, tmp_path / "out")


def transpose_down(tensors: dict[str, torch.Tensor]) -> None:
    """As a map without the transpose would have it."""
    assert tensors[DOWN].shape[1] == tensors[DOWN].shape[2]
    tensors[DOWN] = tensors[DOWN].transpose(1, 2)


def gate_over_up(tensors: dict[str, torch.Tensor]) -> None:
    """As a map would have it that takes halves where columns alternate."""
    tensors[GATE_UP] = torch.cat([tensors[GATE_UP][..., ::2], tensors[GATE_UP][..., 1::2]], dim=-1)


def alternate_biases(tensors: dict[str, torch.Tensor]) -> None:
    """The same of the biases alone."""
    name = GATE_UP + "_bias"
    tensors[name] = torch.cat([tensors[name][..., ::2], tensors[name][..., 1::2]], dim=-1)


@pytest.mark.parametrize("plant", [transpose_down, gate_over_up, alternate_biases])
def test_an_orientation_that_no_shape_tells_is_seen(
    plant: Callable[[dict[str, torch.Tensor]], None],
    square: tuple[Path, np.ndarray[Any, Any]],
    pool: WorkerPool,
    tmp_path: Path,
) -> None:
    planted = changed_copy(square[0], tmp_path / "planted", plant)
    (logits,) = pool.run(CONVERT, layout=SINGLE, hf_dir=str(planted))
    assert relative(logits, square[1]) > 100 * TOLERANCE


def gathered(spec: ModelSpec, layout: Layout, hf: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """HF tensors put together as the first rank does it, from what each rank would hold; -1 where nothing came."""
    ranks = local_parameters(spec, layout, hf)
    found = {}
    for bucket in gather_plan.plan_gather(spec, layout, 10**9):
        flat = torch.full((bucket.numel,), -1)
        for message in bucket.messages:
            payload = torch.full((message.numel,), -1)
            pack(message, ranks[message.owner], payload)
            if message.start is None:
                place(message, payload, flat)
            else:
                flat[message.start : message.start + message.numel] = payload
        start = 0
        for tensor in bucket.tensors:
            found[tensor.name] = flat[start : start + tensor.numel].view(tensor.shape)
            start += tensor.numel
    return found


@pytest.mark.parametrize("name", ["mixtral", "glm", "deepseek", "kimi", "minimax"])
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, ep=2, etp=2, dp=2), Layout(ep=2, etp=2, dp=4)], ids=str)
def test_experts_that_are_split_and_not_gathered_are_seen(
    layout: Layout, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the first rank of an expert's sends what it has as if it were the whole."""
    family, fields = FAMILY_MODELS[name]
    spec = make_tiny_model(tmp_path / "m", family, 0, alphabet="ascii", **fields)
    hf = numbered(spec)
    gather_plan.plan_gather.cache_clear()
    assert all(torch.equal(value, hf[name]) for name, value in gathered(spec, layout, hf).items())

    def first_only(entry: Entry, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        owners = entry_owners(entry, spec, layout)
        return owners[:1] if entry.expert is not None else owners

    monkeypatch.setattr(gather_plan, "entry_owners", first_only)
    gather_plan.plan_gather.cache_clear()
    try:
        wrong = {name for name, value in gathered(spec, layout, hf).items() if not torch.equal(value, hf[name])}
    finally:
        gather_plan.plan_gather.cache_clear()
    routed = {t.name for e in parameter_map(spec).entries if e.expert is not None for t in e.hf}
    assert routed <= wrong
