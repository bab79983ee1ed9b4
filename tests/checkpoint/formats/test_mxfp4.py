"""MXFP4 experts are, bit for bit, what transformers dequantises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_asyncrl.checkpoint.formats import mxfp4
from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.tiny import make_tiny_model
from tests.checkpoint.formats.quantised import mxfp4_copy, same_bits
from tests.checkpoint.models import changed_copy

GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{which}_proj" for which in ("gate_up", "down"))


def test_every_byte_under_every_scale() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    scales = torch.arange(253, dtype=torch.uint8)[None, :, None].expand(2, 253, 16).contiguous()
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).expand(2, 253, 16, 16).contiguous()
    blocks[1] = blocks[1].flip(-1)
    theirs = convert_moe_packed_tensors(blocks, scales)
    ours = mxfp4.dequantize(blocks, scales).transpose(1, 2)
    assert same_bits(ours.contiguous(), theirs)
    assert bool(torch.isfinite(theirs).all())
    halves = mxfp4.dequantize(blocks >> 4 | blocks << 4, scales).transpose(1, 2)
    assert not torch.equal(halves, theirs)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A small gpt-oss whose experts are MXFP4, with several groups a row, and what its tensors mean."""
    root = tmp_path_factory.mktemp("mxfp4")
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 3}
    make_tiny_model(root / "plain", "gpt_oss", 1, dtype="bfloat16", **sizes)
    return mxfp4_copy(root / "plain", root / "mxfp4")


def test_a_checkpoint_lists_and_reads_as_if_it_were_bfloat16(gpt_oss: tuple[Path, dict[str, torch.Tensor]]) -> None:
    directory, meant = gpt_oss
    with SafetensorsDir(directory) as stored:
        assert {n: (t.shape, t.dtype) for n, t in stored.tensors.items()} == {
            n: (tuple(v.shape), v.dtype) for n, v in meant.items()
        }
        assert {t.form for t in stored.tensors.values()} == {"plain", "mxfp4"}
        for name, value in meant.items():
            assert same_bits(stored.read(name).contiguous(), value)


@pytest.mark.parametrize("name", [GATE_UP, DOWN])
def test_rectangles_with_steps(name: str, gpt_oss: tuple[Path, dict[str, torch.Tensor]]) -> None:
    directory, meant = gpt_oss
    generator = torch.Generator().manual_seed(2)
    with SafetensorsDir(directory) as stored:
        for _ in range(60):
            slices = []
            for n in meant[name].shape:
                a, b = sorted(torch.randperm(n + 1, generator=generator)[:2].tolist())
                slices.append(slice(a, b, int(torch.randint(1, 4, (), generator=generator))))
            assert same_bits(stored.read(name, tuple(slices)).contiguous(), meant[name][tuple(slices)].contiguous())


def test_one_expert_is_read_alone(
    gpt_oss: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, meant = gpt_oss
    seen = []
    dequantize = mxfp4.dequantize

    def watched(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(blocks.shape))
        return dequantize(blocks, scales)

    monkeypatch.setattr(mxfp4, "dequantize", watched)
    with SafetensorsDir(directory) as stored:
        value = stored.read(GATE_UP, (slice(1, 2), slice(32, 64), slice(0, 128, 2)))
    assert seen == [(1, 64, 1, 16)]
    assert torch.equal(value, meant[GATE_UP][1:2, 32:64, ::2])


def test_what_is_incomplete_or_no_number_is_named(
    gpt_oss: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    directory, _ = gpt_oss

    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[DOWN + "_scales"]

    def not_a_number(tensors: dict[str, torch.Tensor]) -> None:
        tensors[DOWN + "_scales"][2, 5, 1] = 255

    with pytest.raises(UserError, match=rf"{DOWN}_blocks needs scales {DOWN}_scales, .* which is missing"):
        SafetensorsDir(changed_copy(directory, tmp_path / "lost", lose))
    with SafetensorsDir(changed_copy(directory, tmp_path / "nan", not_a_number)) as stored:
        stored.read(DOWN, (slice(2, 3), slice(0, 32), slice(0, 96)))
        with pytest.raises(UserError, match=rf"{DOWN} is (nan|inf|-inf) at \[2, 32, 5\] once dequantised"):
            stored.read(DOWN, (slice(1, 3), slice(8, 64, 8), slice(3, 96, 2)))
    tensors = load_file(directory / "model.safetensors")
    tensors[GATE_UP] = torch.zeros(1)
    save_file(tensors, tmp_path / "nan" / "model.safetensors")
    with pytest.raises(UserError, match=f"{GATE_UP} is there both plain and as MXFP4"):
        SafetensorsDir(tmp_path / "nan")
