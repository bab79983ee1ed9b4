"""Places that cannot take a directory, outputs that are gone, sources that change, and values that are no numbers."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_asyncrl.checkpoint.convert import convert
from moe_asyncrl.checkpoint.convert.progress import Progress
from moe_asyncrl.cli import main
from tests.checkpoint.convert.support import contents
from tests.checkpoint.models import changed_copy, make

Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("hard"), "moe5")


def refused(said: Said, *words: str) -> str:
    """The one line with which a command ends badly."""
    code = main(list(words))
    out, err = said.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("moe-asyncrl: ")]
    assert code == 2 and out == "" and len(lines) == 1 and "Traceback" not in err, (code, out, err)
    return lines[0]


@pytest.mark.parametrize("command", ["convert hf-to-megatron {model} {out}", "tiny-model {out} --family qwen3"])
@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("file/inside", "cannot be made"),
        ("/proc/inside", "cannot be made"),
        ("link", "is a symbolic link"),
        (".", "name one that does not exist yet"),
    ],
)
def test_places_that_cannot_take_a_directory(
    command: str, out: str, said: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Said
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path / "empty" if out == "." else tmp_path)
    assert said in refused(capfd, *command.format(model=model, out=out).split())
    assert {path.name for path in tmp_path.iterdir()} == before and not any((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_in_the_way_is_not_taken_over(kind: str, model: Path, tmp_path: Path, capfd: Said) -> None:
    partial = tmp_path / ".out.partial"
    if kind == "folder":
        partial.mkdir()
        (partial / "mine.txt").write_text("mine")
    else:
        partial.write_text("mine")
    assert str(partial) in refused(capfd, "convert", "hf-to-megatron", str(model), str(tmp_path / "out"))
    assert (partial / "mine.txt" if kind == "folder" else partial).read_text() == "mine"


def test_a_source_that_changes_meanwhile_is_no_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Said
) -> None:
    source = changed_copy(model, tmp_path / "source", lambda tensors: None)
    carry_out = convert._carry_out

    def change(*args: object) -> None:
        carry_out(*args)  # type: ignore[arg-type]
        os.utime(next(source.glob("*.safetensors")))

    monkeypatch.setattr(convert, "_carry_out", change)
    said = refused(capfd, "convert", "hf-to-megatron", str(source), str(tmp_path / "out"))
    assert "was changed while it was converted" in said and str(tmp_path / ".out.partial") in said
    assert not (tmp_path / "out").exists()


def test_values_that_are_no_numbers_are_shown(model: Path, tmp_path: Path, capfd: Said) -> None:
    def plant(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][3] = float("nan")
        tensors["lm_head.weight"][0, 0] = float("inf")

    other = changed_copy(model, tmp_path / "other", plant)
    assert main(["convert", "diff", str(model), str(other)]) == 1
    out = capfd.readouterr().out
    assert "model.norm.weight  1 of 96 elements differ, by at most nan" in out
    assert "elements differ, by at most inf" in out and out.endswith("2 of 98 tensors differ\n")


def test_an_error_output_that_is_gone_stops_nothing(model: Path, tmp_path: Path) -> None:
    """In a process of its own, whose descriptors are closed."""
    run = [sys.executable, "-m", "moe_asyncrl.cli", "convert", "hf-to-megatron", str(model)]
    closed = f'"$@" {tmp_path / "a"} 2>&-'
    full = f'"$@" {tmp_path / "b"} 2>/dev/full'
    for line in (closed, full):
        assert subprocess.run(["bash", "-c", line, "-", *run], stdout=subprocess.DEVNULL).returncode == 0, line
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_progress_falls_silent() -> None:
    read, write = os.pipe()
    os.close(read)
    gone = os.fdopen(write, "w")
    progress = Progress("convert", 10, out=gone)
    progress.finish()
    progress.abandon()
    with pytest.raises(BrokenPipeError):
        gone.close()


def test_a_damaged_source_is_not_to_be_tried_again(tmp_path: Path, capfd: Said) -> None:
    from tests.checkpoint.formats.quantised import fp8_copy

    plain = make(tmp_path / "plain", "moe4", "bfloat16")
    quantised, _ = fp8_copy(plain, tmp_path / "fp8")
    path = next(quantised.glob("*.safetensors"))
    with path.open("r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
        name = next(n for n, entry in header.items() if entry.get("dtype") == "F8_E4M3")
        file.seek(8 + length + header[name]["data_offsets"][0])
        file.write(b"\x7f")
    said = refused(capfd, "convert", "hf-to-megatron", str(quantised), str(tmp_path / "out"))
    assert name in said and said.endswith(f"remove {tmp_path / '.out.partial'}, and start anew")


def test_what_megatron_needs_too_is_missed(model: Path, tmp_path: Path, capfd: Said) -> None:
    assert main(["convert", "hf-to-megatron", str(model), str(tmp_path / "iter_0000010")]) == 0
    capfd.readouterr()
    (tmp_path / "runs").mkdir()
    (tmp_path / "iter_0000010").rename(tmp_path / "runs" / "iter_0000010")
    said = refused(capfd, "convert", "megatron-to-hf", str(tmp_path / "runs"), str(tmp_path / "out"))
    assert said.endswith(f"name one, such as {tmp_path / 'runs' / 'iter_0000010'}")
    assert "not a distributed checkpoint" in refused(
        capfd, "convert", "megatron-to-hf", str(model), str(tmp_path / "out")
    )
    (tmp_path / "runs" / "iter_0000010" / "common.pt").unlink()
    assert "common.pt is missing" in refused(capfd, "convert", "verify", str(tmp_path / "runs" / "iter_0000010"))


def test_a_size_of_no_end_is_refused(model: Path, tmp_path: Path, capfd: Said) -> None:
    words = ("convert", "megatron-to-hf", str(model), str(tmp_path / "out"), "--shard-gb", "inf")
    assert "--shard-gb is inf" in refused(capfd, *words)
