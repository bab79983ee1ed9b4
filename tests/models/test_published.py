"""Published sizes: what a spec counts is what the publisher states, to the publisher's rounding."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.counts import Counts, count
from moe_asyncrl.models.published import Stated, counted, read_published

FILES = sorted(Path("configs/models").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_counts_are_what_the_publisher_states(path: Path) -> None:
    published = read_published(path)
    counts = count(published.spec)
    assert published.total.agrees(counted(counts, published.total)[0])
    assert published.active.agrees(counted(counts, published.active)[1])
    assert hash(published.spec) == hash(dataclasses.replace(published.spec))


def test_every_large_family_has_a_published_size() -> None:
    assert {read_published(path).spec.family for path in FILES} == {
        *("qwen3", "qwen3_moe", "llama", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "minimax_m2")
    }


@pytest.mark.parametrize(
    ("stated", "number", "agrees"),
    [
        (Stated("671B"), 671_400_000_000, True),
        (Stated("671B"), 671_600_000_000, False),
        (Stated("3.3B"), 3_353_000_000, False),
        (Stated("3.3B", cut=True), 3_353_000_000, True),
        (Stated("230B"), 228_700_000_000, True),
        (Stated("230B"), 224_000_000_000, False),
        (Stated("1T"), 1_026_000_000_000, True),
        (Stated("1T"), 1_600_000_000_000, False),
    ],
)
def test_rounding(stated: Stated, number: int, agrees: bool) -> None:
    assert stated.agrees(number) is agrees


def test_what_is_left_out_is_not_counted() -> None:
    counts = Counts(total=100, active=40, embedding=10, output=7, mtp=5)
    assert counted(counts, Stated("1B")) == (100, 40)
    assert counted(counts, Stated("1B", leaves_out=("embedding", "output"))) == (88, 23)


def test_a_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("total: {stated: 1B}\n")
    with pytest.raises(UserError, match=r"m\.yaml: .*missing required field `active`"):
        read_published(tmp_path / "m.yaml")
