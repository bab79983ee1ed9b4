"""The built-in rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_asyncrl.scoring.rules import exact, last_number, numeric


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 42.", 42.0),
        ("3 + 4 = 7", 7.0),
        ("5-3", 3.0),
        ("x=-3", -3.0),
        ("−2.5 degrees", -2.5),
        ("$1,234,567.50", 1234567.5),
        ("1,23", 23.0),  # no thousands separator: two numbers
        ("3/4", 0.75),
        ("about 1e-3", 1e-3),
        ("12.5%", 0.125),
        ("\\boxed{17}", 17.0),
        ("The answer is...5", 5.0),
        (".5", 0.5),
        ("v2", None),
        ("none", None),
        ("", None),
        ("1/0", None),
        ("1e999", None),
    ],
)
def test_the_last_number(text: str, value: float | None) -> None:
    assert last_number(text) == (pytest.approx(value) if value is not None else None)


def test_numeric_and_exact() -> None:
    assert numeric("it is 0.75", "3/4") == 1.0
    assert numeric("1,000", "1000") == 1.0
    assert numeric("1000.1", "1000") == 0.0
    assert numeric("1000.0000001", "1000") == 1.0
    assert numeric("no idea", "7") == 0.0
    assert exact(" 7\n", "7") == 1.0
    assert exact("7.0", "7") == 0.0


@given(st.integers(-(10**12), 10**12))
def test_numbers_survive_their_formats(n: int) -> None:
    assert last_number(str(n)) == n and last_number(f"so {n:,}.") == n and numeric(f"= {n}", f"{n:,}") == 1.0


@given(st.text())
def test_any_text_has_a_verdict(text: str) -> None:
    assert numeric(text, "1") in (0.0, 1.0)


def test_the_rule_is_linear_in_the_text() -> None:
    """No pattern that goes back over the text: with one, these would take hours."""
    for text in ("1," * 200_000, "1,111" * 100_000, "1 /" * 200_000, "1" * 400_000, "1e" * 200_000):
        numeric(text, "1")
