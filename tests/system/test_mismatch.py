"""`moe-asyncrl mismatch` on a user's finished run: table, JSON, picture, bounds and bad input."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from moe_asyncrl.cli import main
from tests.system.command import run_command
from tests.system.user_run import STEPS, Done


def test_a_run_taken_apart(done: Done) -> None:
    """The engine rounds, the trainer does not: on tokens of the model that the run started from."""
    more = ("--same-version", "--max-kl", "1e-2", "--picture", "gap.svg")
    said = run_command(done.home, "mismatch", "runs/latest", "--json", *more)
    assert said.code == 0, said
    found = json.loads(said.out)
    assert found["version"] == 0 and found["weights"] == str((done.home / "model").resolve())
    assert 0 < found["gap"]["kl"] < 1e-2 and found["gap"]["tokens"] > 20 and found["bounds"]["hold"]
    assert [v["version"] for v in found["versions"]] == [0]
    tried = {f["cause"] for f in found["tried"]}
    assert {"precision", "rows", "weights"} <= tried, "the checkpoint of the last step is another version to try"
    drops = [f["drop"] for f in found["findings"]]
    assert drops == sorted(drops, reverse=True)
    assert len(found["layers"]) == 2 and all(0 <= x["flips"] < 0.5 for x in found["layers"])
    drawing = ElementTree.parse(done.home / "gap.svg").getroot()
    words = "".join(drawing.itertext())
    assert drawing.tag.endswith("svg") and "precision" in words and "layer 1" in words and "routing replay" in words


def test_a_checkpoint_and_a_bound_that_does_not_hold(done: Done) -> None:
    """Weights that sampled none of the tokens: what is not known is said, and the exit code is 1."""
    step = f"runs/latest/checkpoints/step-{STEPS:08d}"
    said = run_command(done.home, "mismatch", step, "--max-abs", "1e-9")
    assert said.code == 1, said
    lines = said.out.splitlines()
    assert f"version {STEPS} (" in lines[0] and lines[-1].startswith("bound exceeded: max |Δ| ")
    # Version 0 sampled some of them, and its weights are there.
    assert "evaluating weights: each token under the version that sampled it" in said.err
    assert any(line.startswith("weights ") for line in lines)
    assert any(line.startswith("not known: weights: no weights of version 1, 2") for line in lines), lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: not a run folder"),
        (["runs/latest", "--step", "99"], "no trajectory of step 99 is recorded"),
        (["runs/latest", "--max-kl", "nan"], "--max-kl nan: a number that is at least 0"),
        (["runs/latest", "--limit", "0"], "--limit 0: at least 1"),
        (["runs/latest/checkpoints/step-00000099"], "step-00000099: not a complete checkpoint"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    done: Done, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(done.home))
    assert main(["mismatch", *words]) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and message in err
