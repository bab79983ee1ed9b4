"""Damaged sources, full disks, killed processes: one clear line or a clean resume, never a wrong checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_asyncrl.checkpoint.convert import convert as convert_module
from moe_asyncrl.checkpoint.convert import crew
from moe_asyncrl.checkpoint.convert.convert import hf_to_megatron, megatron_to_hf
from moe_asyncrl.checkpoint.convert.to_hf import plan_to_hf
from moe_asyncrl.checkpoint.convert.to_megatron import plan_to_megatron
from moe_asyncrl.checkpoint.convert.workspace import workspace
from moe_asyncrl.checkpoint.safetensors_header import INDEX
from moe_asyncrl.data.errors import UserError
from tests.checkpoint.convert.interrupted import children, done_units, killed_at_random, started, until
from tests.checkpoint.convert.support import contents
from tests.checkpoint.models import changed_copy, make

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of five layers in one file."""
    return make(tmp_path_factory.mktemp("models"), "moe5")


@pytest.fixture(scope="module")
def converted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a distributed checkpoint."""
    out = tmp_path_factory.mktemp("converted") / "m"
    hf_to_megatron(model, out, workers=1)
    return out


@pytest.fixture
def sharded(model: Path, converted: Path, tmp_path: Path) -> Path:
    """The same in several HF files."""
    megatron_to_hf(converted, tmp_path / "sharded", shard_bytes=300_000, workers=1)
    return tmp_path / "sharded"


def refused(source: Path, out: Path) -> str:
    """The error of a conversion that leaves nothing behind."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(UserError) as caught:
        hf_to_megatron(source, out, workers=1)
    assert sorted(out.parent.iterdir()) == before
    return str(caught.value)


# ---- sources


def test_a_truncated_file(sharded: Path, tmp_path: Path) -> None:
    path = sorted(sharded.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{path} is truncated or damaged" in refused(sharded, tmp_path / "out")


def test_two_files_exchanged(sharded: Path, tmp_path: Path) -> None:
    a, b = sorted(sharded.glob("*.safetensors"))[:2]
    a.rename(tmp_path / "x"), b.rename(a), (tmp_path / "x").rename(b)
    text = refused(sharded, tmp_path / "out")
    assert text.startswith(f"{a} holds tensor ") and f"which {INDEX} puts into {b.name}" in text


def test_an_index_that_names_what_is_not_there(sharded: Path, tmp_path: Path) -> None:
    index = sharded / INDEX
    name = sorted(sharded.glob("*.safetensors"))[0].name
    index.write_text(index.read_text().replace('"weight_map": {', f'"weight_map": {{"ghost.weight": "{name}", '))
    assert f"names tensors in files that do not hold them: ghost.weight ({name})" in refused(sharded, tmp_path / "o")


def stack_experts(tensors: Tensors) -> None:
    """One tensor for all experts of layer 1, as some checkpoints have it."""
    for which in ("gate", "up", "down"):
        names = [f"model.layers.1.mlp.experts.{e}.{which}_proj.weight" for e in range(4)]
        tensors[f"model.layers.1.mlp.experts.{which}_proj"] = torch.stack([tensors.pop(name) for name in names])


def lose_and_add(tensors: Tensors) -> None:
    del tensors["model.norm.weight"], tensors["model.layers.3.mlp.gate.weight"]
    tensors["model.layers.7.mlp.gate.weight"] = torch.zeros(2)


def reshape(tensors: Tensors) -> None:
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.4.self_attn.q_proj.weight"):
        tensors[name] = tensors[name][:-8]


def widen(tensors: Tensors) -> None:
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.4.mlp.experts.3.up_proj.weight"):
        tensors[name] = tensors[name].bfloat16()


def count(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(96, dtype=torch.int64)


FAULTS: list[tuple[Callable[[Tensors], None], list[str]]] = [
    (
        stack_experts,
        [
            "12 missing: model.layers.1.mlp.experts.0.down_proj.weight, model.layers.1.mlp.experts.0.gate_proj.weight",
            "model.layers.1.mlp.experts.3.up_proj.weight",
            "3 unexpected: model.layers.1.mlp.experts.down_proj, model.layers.1.mlp.experts.gate_proj",
        ],
    ),
    (
        lose_and_add,
        [
            "2 missing: model.layers.3.mlp.gate.weight, model.norm.weight",
            "1 unexpected: model.layers.7.mlp.gate.weight",
        ],
    ),
    (
        reshape,
        [
            "2 tensors do not fit the model",
            "model.layers.0.self_attn.q_proj.weight is [88, 96], the model needs [96, 96]",
            "model.layers.4.self_attn.q_proj.weight is [88, 96]",
        ],
    ),
    (
        widen,
        [
            "2 tensors have another type than their kind",
            "model.layers.0.self_attn.q_proj.weight is bfloat16, others of its kind float32",
            "model.layers.4.mlp.experts.3.up_proj.weight is bfloat16",
        ],
    ),
    (count, ["tensor model.norm.weight has type I64, only F32, BF16, F16 are supported as they are"]),
]


@pytest.mark.parametrize(("change", "said"), FAULTS, ids=[f.__name__ for f, _ in FAULTS])
def test_tensors_that_are_not_the_models(
    change: Callable[[Tensors], None], said: list[str], model: Path, tmp_path: Path
) -> None:
    text = refused(changed_copy(model, tmp_path / "changed", change), tmp_path / "out")
    assert all(part in text for part in said), text


def test_a_tied_model_with_an_output_layer_of_its_own(tmp_path: Path) -> None:
    tied = make(tmp_path, "moe4tied")

    def spare(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def other(tensors: Tensors) -> None:
        spare(tensors)
        tensors["lm_head.weight"][3, 5] += 1

    hf_to_megatron(changed_copy(tied, tmp_path / "spare", spare), tmp_path / "out", workers=1)
    megatron_to_hf(tmp_path / "out", tmp_path / "back", workers=1)
    assert contents(tmp_path / "back") == contents(tied)
    text = refused(changed_copy(tied, tmp_path / "other", other), tmp_path / "none")
    assert "lm_head.weight differs from model.embed_tokens.weight in 1 elements" in text


# ---- places


def test_a_place_that_is_taken(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    assert "exists and is not an empty directory" in refused(model, tmp_path / "out")
    with workspace(tmp_path / "other"):
        assert "another process is converting into" in refused(model, tmp_path / "other")


def test_what_was_interrupted_is_bound_to_its_source_and_options(model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(model, source)
    stopped(source, out)
    with pytest.raises(UserError, match="interrupted conversion with other options"):
        hf_to_megatron(source, out, mtp="drop", workers=1)
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(UserError, match=r"1 differ, model\.safetensors among them.*: the source has changed"):
        hf_to_megatron(source, out, workers=1)
    assert not out.exists()


def stopped(source: Path, out: Path) -> None:
    """A conversion that was killed when some of it was done."""
    with started("hf-to-megatron", str(source), str(out), rest=0.05) as process:
        until(lambda: done_units(out) >= 2)
        process.kill()
        process.wait()
    assert not out.exists() and done_units(out) >= 2


# ---- the disk


def test_a_full_disk(model: Path, converted: Path, tmp_path: Path) -> None:
    """A real one: the device that is always full stands where the first file goes."""
    for convert, source, name in (
        (hf_to_megatron, model, "__0_0.distcp"),
        (megatron_to_hf, converted, ".convert/journal.jsonl"),
    ):
        out = tmp_path / convert.__name__
        partial = tmp_path / f".{out.name}.partial"
        (partial / ".convert").mkdir(parents=True)
        (partial / name).symlink_to("/dev/full")
        with pytest.raises(UserError, match=r"No space left on device.*make room and repeat the same command"):
            convert(source, out, workers=1)
        assert not out.exists()
        (partial / name).unlink()
        convert(source, out, workers=1)
        assert contents(out) == contents(converted if convert is hf_to_megatron else model)


def test_a_limit_on_files_then_room(model: Path, converted: Path, tmp_path: Path) -> None:
    """Every file may have 200 kB: that of the head does not fit. Then without the limit."""
    out = tmp_path / "out"
    with started("megatron-to-hf", str(converted), str(out), largest_file=200_000) as process:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 2 and "File too large" in said and "Traceback" not in said
    assert not out.exists()
    with started("megatron-to-hf", str(converted), str(out)) as process:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert contents(out) == contents(model)


# ---- processes


def test_a_worker_that_is_killed_is_named_and_the_others_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = crew._give

    def kill_first(worker: crew._Worker, waiting: object, number: int) -> None:
        if number == 1:
            worker.process.kill()
            worker.process.wait()
        given(worker, waiting, number)  # type: ignore[arg-type]

    monkeypatch.setattr(crew, "_give", kill_first)
    with pytest.raises(UserError, match=r"worker 1 \(process \d+\) was killed by SIGKILL.*repeat the same command"):
        run_in_small_units(model, tmp_path / "out", monkeypatch)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(crew, "_give", given)
    run_in_small_units(model, tmp_path / "out", monkeypatch)
    megatron_to_hf(tmp_path / "out", tmp_path / "back", workers=1)
    assert contents(tmp_path / "back") == contents(model)


def run_in_small_units(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_module, "plan_to_megatron", lambda *a: plan_to_megatron(*a, unit_bytes=60_000))
    hf_to_megatron(source, out, workers=2)


def test_control_c_ends_it_at_once_and_it_goes_on(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started("hf-to-megatron", str(model), str(out), rest=0.05) as process:
        until(lambda: done_units(out) >= 2)
        family = children(process)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 130
        assert "interrupted; the same command goes on" in said and "Traceback" not in said
        assert not any(child.is_running() for child in family)
    assert not out.exists()
    before = done_units(out)
    partial = tmp_path / ".out.partial"
    with (partial / ".convert" / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"unit":3,"targ')  # torn by a crash of the machine
    kept = {p.name: p.stat().st_mtime_ns for p in partial.glob("__*.distcp")}
    with started("hf-to-megatron", str(model), str(out)) as process:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    same = [name for name, when in kept.items() if (out / name).stat().st_mtime_ns == when]
    assert len(same) >= before
    megatron_to_hf(out, tmp_path / "back", workers=1)
    assert contents(tmp_path / "back") == contents(model)


def test_killed_at_random_it_goes_on_to_the_same_bytes(model: Path, tmp_path: Path) -> None:
    """The parent or a worker, three times in each direction; `soak.py` does it twenty times."""
    with started("hf-to-megatron", str(model), str(tmp_path / "whole")) as process:
        assert process.wait(60) == 0
    expected = contents(tmp_path / "whole")
    assert killed_at_random("hf-to-megatron", model, tmp_path / "a", expected, 3, seed=1) >= 1
    assert killed_at_random("megatron-to-hf", tmp_path / "a", tmp_path / "b", contents(model), 3, seed=2) >= 1


def test_a_file_that_was_lost_is_written_again_whole(
    model: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stays so when the next start is interrupted too: what its journal said of it is forgotten for good."""
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    with started("megatron-to-hf", str(converted), str(out), rest=0.05) as process:
        until(lambda: done_units(out) >= 4)
    file = partial / "model.safetensors"
    header = file.read_bytes()[:1000]
    for damage in ("gone", "header", "size"):
        if damage == "gone":
            file.unlink()
        elif damage == "header":
            with file.open("r+b") as begun:
                begun.write(bytes(100))
        else:
            os.truncate(file, file.stat().st_size - 1)
        monkeypatch.setattr(convert_module, "run_units", interrupt)
        with pytest.raises(KeyboardInterrupt):
            small_to_hf(converted, out, monkeypatch)
        assert done_units(out) == 0 and file.read_bytes()[:1000] == header
    monkeypatch.undo()
    with started("megatron-to-hf", str(converted), str(out)) as process:
        assert process.wait(60) == 0
    assert contents(out) == contents(model)


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def small_to_hf(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_module, "plan_to_hf", lambda *a, **k: plan_to_hf(*a, **k, unit_bytes=60_000))
    megatron_to_hf(source, out, workers=1)
