"""What is said of a finding: bounds, JSON, lines, picture; and which weights and groups are chosen."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from moe_asyncrl.config.load import parse_recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.recorded import RecordedGroup
from moe_asyncrl.data.wire import encode
from moe_asyncrl.telemetry.bars import Bar, Panel, picture
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.train.mismatch.causes import LayerReport, Mismatch, Unknown, VersionGap
from moe_asyncrl.train.mismatch.gap import Control, Gap, finding_of, gap_of
from moe_asyncrl.train.mismatch.sources import choose_version, sources_of, touches
from moe_asyncrl.train.mismatch.text import Bounds, as_values, lines
from tests.data.samples import trajectory
from tests.train.test_checkpoint import sealed

ABOUT = {"run": "/runs/x", "weights": "/runs/x/checkpoints/step-00000020", "trajectories": 2, "steps": [21, 23]}


def mismatch(size: float) -> Mismatch:
    """Two trajectories whose gap of `size` the temperature explains."""
    sampler, owner = np.zeros(6), np.asarray([0, 0, 0, 1, 1, 1])
    trainer = np.full(6, size)
    cause = finding_of(sampler, trainer, Control("temperature", "the one", sampler, sampler), owner)
    gap = gap_of(sampler, trainer, owner)
    return Mismatch(
        version=20,
        gap=gap,
        findings=(cause,),
        tried=(cause,),
        handled=(("routing replay", gap),),
        steps=(cause,) if cause.named else (),
        unknown=(Unknown("weights", "there are none"),),
        versions=(VersionGap(20, gap, True), VersionGap(19, gap, False)),
        layers=(LayerReport(1, 0.25, 0.5, 0.75),),
        temperature=0.7,
    )


def test_bounds_hold_up_to_their_value_and_never_for_what_is_no_number() -> None:
    gap = Gap(3, 1e-3, 0.0, 0.01, 0.2)
    assert Bounds().broken(gap) == [] and Bounds(1e-3, 0.2).broken(gap) == []
    assert [b.split(" is ")[0] for b in Bounds(9e-4, 0.19).broken(gap)] == ["mean k3 0.001", "max |Δ| 0.2"]
    nothing = Gap(3, float("nan"), 0.0, 0.0, float("nan"))
    assert len(Bounds(1.0, 1.0).broken(nothing)) == 2


def test_lines_and_json_say_the_same() -> None:
    found = mismatch(0.2)
    text = "\n".join(lines(found, ABOUT, Bounds(1e-3)))
    for part in ("first: temperature: the one", "not known: weights: there are none", "bound exceeded: mean k3"):
        assert part in text
    assert "controlled already: without routing replay" in text and "25.000%" in text and "these were evaluated" in text
    values = json.loads(json.dumps(as_values(found, ABOUT, Bounds(1e-3)), allow_nan=False))
    assert values["first"] == "temperature" and values["findings"][0]["named"] and not values["bounds"]["hold"]
    assert values["gap"]["kl"] == found.gap.kl and values["handled"][0]["what"] == "routing replay"


def test_no_gap_names_nothing() -> None:
    found = mismatch(0.0)
    assert "nothing that was tried explains the gap" in "\n".join(lines(found, ABOUT, Bounds()))
    assert as_values(found, ABOUT, Bounds())["first"] is None


def test_a_picture_has_a_bar_for_each_value_in_proportion() -> None:
    drawing = ElementTree.fromstring(
        picture("a < b", [Panel("p", (Bar("x", 4.0, "4"), Bar("y", 1.0, "1", strong=True), Bar("z", -1.0, "-1")))])
    )
    rects = [e for e in drawing if e.tag.endswith("rect") and e.get("class")]
    widths = [float(r.get("width") or 0) for r in rects]
    assert widths[1] == pytest.approx(widths[0] / 4, abs=0.1) and widths[2] == 0 and widths[0] > 100
    assert [r.get("class") for r in rects] == ["bar", "strong", "bar"] and "a < b" in "".join(drawing.itertext())


def recorded(step: int, *versions: int) -> RecordedGroup:
    made = trajectory()
    at = np.where(made.loss_mask, versions[0], -1).astype(np.int32)
    at[np.flatnonzero(made.loss_mask)[-1]] = versions[-1]
    header, _ = encode(dataclasses.replace(made, weight_version=at))
    return RecordedGroup(step=step, version=step - 1, index=0, attempt=0, time=0.0, headers=(header,))


def test_the_newest_weights_that_recorded_tokens_have_to_do_with() -> None:
    groups = [recorded(22, 19, 20), recorded(21, 19), recorded(3, 0)]
    assert touches(groups[0], 20) and touches(groups[0], 21) and not touches(groups[0], 21, sampled=True)
    assert choose_version(groups, [0, 20, 40]) == 20
    assert choose_version(groups[1:], [0, 20, 40]) == 20 and choose_version(groups[1:], [0, 20, 40], sampled=True) == 0
    assert choose_version(groups, [40]) == 40
    with pytest.raises(UserError, match="no complete checkpoint"):
        choose_version(groups, [])


def test_what_a_run_still_has(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    sealed(run.checkpoints, 20)
    base = {"model": {"path": str(tmp_path / "model")}, "data": {"train": "x"}, "reward": {"function": "exact"}}
    plain = sources_of(run, parse_recipe(base))
    assert plain == {0: tmp_path / "model", 20: run.checkpoints / "step-00000020"}
    warmed = parse_recipe({**base, "warmup": {"steps": 5, "data": "y"}})
    assert set(sources_of(run, warmed)) == {20}, "after a warm-up the model's directory is not version 0"
    sealed(run.reference, 0)
    assert sources_of(run, warmed)[0] == run.reference / "step-00000000"
