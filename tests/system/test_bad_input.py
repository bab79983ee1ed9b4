"""What a user gets wrong: exit code 2, one line that says what and where, and nothing started or left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_asyncrl.cli import main
from tests.system.command import run_command
from tests.system.projects import make_project, sums, write_lines


def truncate_weights(folder: Path) -> None:
    """The model's copy ends in the middle of its last tensor."""
    source = (folder / "model").resolve()
    (folder / "model").unlink()
    shutil.copytree(source, folder / "model")
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def break_line(folder: Path) -> None:
    """The third line is cut off."""
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    lines[2] = lines[2][:20] + "\n"
    (folder / "train.jsonl").write_text("".join(lines))


def empty_file(folder: Path) -> None:
    """Nothing but blank lines."""
    (folder / "train.jsonl").write_text("\n\n")


def long_prompt(folder: Path) -> None:
    """The second line has more tokens than the context."""
    lines = sums(3)
    lines[1]["messages"][0]["content"] = "1" * 70
    write_lines(folder / "train.jsonl", lines)


def broken_module(folder: Path) -> None:
    """Imports what is not installed."""
    (folder / "broken.py").write_text("import no_such_package_at_all\n\ndef reward(*a): return 0.0\n")


def fine(folder: Path) -> None:
    """The folder is in order."""


@pytest.mark.parametrize(
    ("harm", "overrides", "expected"),
    [
        (fine, ["optimizer.learning_rat=1e-3"], ["optimizer.learning_rat", "unknown key"]),
        (fine, ["rollout.group_sise=4"], ["rollout.group_sise", "did you mean 'group_size'?"]),
        (fine, ["rollout.group_size=0"], ["rollout.group_size", ">= 1", "found 0"]),
        (fine, ["rollout.temperature=0"], ["rollout.temperature", "> 0", "found 0"]),
        (fine, ["rollout.temperature=-1"], ["rollout.temperature", "> 0", "found -1"]),
        (fine, ["model.path=nowhere"], ["nowhere", "does not exist"]),
        (truncate_weights, [], ["model.safetensors", "truncated"]),
        (break_line, [], ["train.jsonl:3", "not valid JSON"]),
        (empty_file, [], ["train.jsonl", "no prompt"]),
        (fine, ["data.train=nothing.jsonl"], ["nothing.jsonl", "No such file"]),
        (long_prompt, [], ["train.jsonl:2", "64"]),
        (fine, ["reward.function=no_such_module:reward"], ["no module 'no_such_module'", "looked in"]),
        (fine, ["reward.function=rewards:no_such"], ["rewards", "no 'no_such'"]),
        (broken_module, ["reward.function=broken:reward"], ["broken", "no_such_package_at_all"]),
        (fine, ["trainer.pp=3"], ["3", "layers"]),
        (fine, ["trainer.dp=3", "trainer.ep=3"], ["3", "experts"]),
        (fine, ["trainer.ep=2"], ["trainer.ep", "raise trainer.dp"]),
        (fine, ["run.resume=true"], ["run.resume", "no run named 'mine'"]),
    ],
)
def test_one_line_that_says_what_is_wrong(
    tmp_path: Path,
    small_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    harm: Callable[[Path], None],
    overrides: list[str],
    expected: list[str],
) -> None:
    folder = make_project(tmp_path / "mine", small_model)
    harm(folder)
    monkeypatch.chdir(folder)
    assert main(["run", "recipe.yaml", *overrides]) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith("moe-asyncrl: "), err
    assert all(part in err for part in expected), err
    assert not (folder / "runs").exists()


def test_the_command_itself_says_so_too(tmp_path: Path, small_model: Path) -> None:
    """As a process, from the recipe file: the line of the mistake is named."""
    folder = make_project(tmp_path / "mine", small_model, rollout={"group_sise": 4})
    said = run_command(folder, "run", "recipe.yaml")
    line = (folder / "recipe.yaml").read_text().splitlines().index("  group_sise: 4") + 1
    assert said.code == 2 and said.out == ""
    assert said.err == (
        f"moe-asyncrl: recipe.yaml:{line}: unknown key 'rollout.group_sise'; did you mean 'group_size'?\n"
    )
    assert not (folder / "runs").exists()


def test_a_good_recipe_is_shown_as_it_will_be_used(tmp_path: Path, small_model: Path) -> None:
    """The counterpart: the same folder without a mistake is accepted."""
    folder = make_project(tmp_path / "mine", small_model)
    said = run_command(folder, "config", "show", "recipe.yaml", "run.steps=7")
    assert said.code == 0 and said.err == "" and "steps: 7" in said.out
    assert json.loads((folder / "train.jsonl").read_text().splitlines()[0])["id"] == 0
