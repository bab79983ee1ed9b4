"""`moe-asyncrl convert` as a user types it: what it prints, its exit codes, and what it does without."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_asyncrl.checkpoint.convert.progress import Progress
from moe_asyncrl.cli import main
from tests.checkpoint.convert.support import contents
from tests.checkpoint.models import changed_copy, make

Said = pytest.CaptureFixture[str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, as the documents speak of it."""
    make(tmp_path, "moe5").rename(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(said: Said, *words: str) -> tuple[int, str, str]:
    code = main(["convert", *words])
    out, err = said.readouterr()
    return code, out, err


def test_the_commands_of_the_document(home: Path, capfd: Said) -> None:
    code, out, err = run(capfd, "hf-to-megatron", "my-model", "my-checkpoint")
    assert (code, out) == (0, "my-checkpoint\n") and "1.3 MB of 1.3 MB  100 %" in err
    code, out, err = run(capfd, "megatron-to-hf", "my-checkpoint", "my-model-again")
    assert (code, out) == (0, "my-model-again\n") and "100 %" in err
    assert contents(home / "my-model-again") == contents(home / "my-model")
    code, out, err = run(capfd, "inspect", "my-checkpoint")
    assert (code, err) == (0, "")
    for line in (
        "kind        distributed checkpoint of Megatron-Core (torch_dist)",
        "family      qwen3_moe (Qwen3MoeForCausalLM)",
        "parameters  332,336 (295,472 a token)",
        "types       float32 1.3 MB",
        "complete    yes: every tensor of the model is there once, in its shape, and nothing else",
        "decoder.layers.*.mlp.experts.experts.linear_fc1.weight  float32 [4, 64, 96]  x 4",
    ):
        assert line in out.splitlines()
    code, out, _ = run(capfd, "verify", "my-model", "my-checkpoint")
    assert code == 0 and out.splitlines()[-1] == "equal bit by bit: 98 tensors, 332336 elements"
    code, out, _ = run(capfd, "diff", "my-checkpoint", "my-model-again")
    assert code == 0
    shutil.copytree(home / "my-checkpoint", home / "my-megatron-run", ignore=shutil.ignore_patterns("hf"))
    words = ("megatron-to-hf", "my-megatron-run", "my-trained-model", "--config", "my-model")
    assert run(capfd, *words)[:2] == (0, "my-trained-model\n")
    assert contents(home / "my-trained-model") == contents(home / "my-model")
    code, out, _ = run(capfd, "verify", "my-model")
    assert code == 0 and out == "my-model: a whole HF checkpoint of qwen3_moe: 98 tensors, 1.3 MB\n"


def test_differences_are_shown_and_are_an_exit_code(home: Path, capfd: Said) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][3] += 0.5
        tensors["lm_head.weight"][:2] = 0.0
        tensors["model.layers.0.mlp.gate.weight"] = tensors["model.layers.0.mlp.gate.weight"].double().float()[:, :50]
        tensors["extra.weight"] = tensors.pop("model.layers.4.mlp.gate.weight")

    changed_copy(home / "my-model", home / "changed", change)
    assert run(capfd, "hf-to-megatron", "my-model", "my-checkpoint")[0] == 0
    code, out, _ = run(capfd, "diff", "my-checkpoint", "changed")
    lines = out.splitlines()
    assert code == 1
    assert lines[:3] == [
        "model.layers.4.mlp.gate.weight  only in my-checkpoint",
        "extra.weight  only in changed",
        "model.layers.0.mlp.gate.weight  float32 [4, 96] and float32 [4, 50]",
    ]
    assert "model.norm.weight  1 of 96 elements differ, by at most 0.5" in lines
    assert any(line.startswith("lm_head.weight  192 of 25824 elements differ, by at most ") for line in lines)
    assert lines[-1] == "5 of 99 tensors differ"
    code, _, err = run(capfd, "verify", "my-checkpoint", "changed")
    assert code == 2 and "1 missing: model.layers.4.mlp.gate.weight; 1 unexpected: extra.weight" in err
    assert run(capfd, "inspect", "changed")[1].count("complete    no: changed: HF tensors do not match the model") == 1


def test_bits_that_compare_equal_are_different(home: Path, capfd: Said) -> None:
    """Zero and minus zero: no difference in value, and not the same checkpoint."""

    def zero(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][3] = 0.0

    def minus(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][3] = -0.0

    changed_copy(home / "my-model", home / "a", zero), changed_copy(home / "my-model", home / "b", minus)
    code, out, _ = run(capfd, "verify", "a", "b")
    assert code == 1 and "model.norm.weight  1 of 96 elements differ, by at most 0" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("hf-to-megatron", "nothing", "out"), "model directory nothing does not exist"),
        (("hf-to-megatron", "my-model", "out", "--workers", "0"), "--workers is 0; it must be at least 1"),
        (("megatron-to-hf", "my-model", "out"), "my-model has no metadata.json"),
        (("megatron-to-hf", "my-model", "out", "--config", "my-model"), "my-model has no metadata.json"),
        (("megatron-to-hf", "my-model", "out", "--shard-gb", "0"), "--shard-gb is 0.0; it must be above 0"),
        (
            ("megatron-to-hf", "my-model", "out", "--form", "fp8", "--dtype", "float32"),
            "--form fp8 gives every tensor the type that was published; leave --dtype out",
        ),
        (("inspect", "nothing"), "nothing does not exist, or is no directory"),
        (("verify", "."), ". is neither an HF directory with safetensors files nor a distributed checkpoint"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(words: tuple[str, ...], said: str, home: Path, capfd: Said) -> None:
    code, out, err = run(capfd, *words)
    assert code == 2 and out == "" and err.startswith("moe-asyncrl: ") and said in err and err.count("\n") == 1
    assert [path.name for path in home.iterdir()] == ["my-model"]


def test_too_small_a_disk_is_said_before_anything_is_written(
    home: Path, capfd: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(home)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    code, _, err = run(capfd, "hf-to-megatron", "my-model", "out")
    assert code == 2 and "has 1.0 MB free, the conversion needs 1.3 MB; make room and repeat" in err


def test_no_torch_is_needed(home: Path) -> None:
    """In a fresh interpreter: importing it takes longer than converting a gigabyte."""
    script = """
import sys
from moe_asyncrl.cli import main
assert main(["convert", "hf-to-megatron", "my-model", "out", "--workers", "1"]) == 0
assert main(["convert", "megatron-to-hf", "out", "back", "--workers", "1"]) == 0
assert main(["convert", "inspect", "out"]) == 0
assert main(["convert", "verify", "my-model", "back"]) == 0
heavy = {"torch", "numpy", "safetensors", "transformers", "megatron"} & sys.modules.keys()
assert not heavy, heavy
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr


def test_progress_says_rate_part_and_rest() -> None:
    progress = Progress("convert", 10_000_000_000, before=1_000_000_000)
    progress.add(3_000_000_000)
    assert progress.line(6.0) == "convert  4.0 GB of 10.0 GB  40 %  500 MB/s  ETA 12s"
    progress.add(6_000_000_000)
    assert progress.line(10.0) == "convert  10.0 GB of 10.0 GB  100 %  900 MB/s"
