"""Built-in rewards: 1.0 for a right answer, 0.0 for a wrong one. Linear in the text's length, so they cannot hang."""

from __future__ import annotations

import collections
import math
import re

RELATIVE_TOLERANCE = 1e-6

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_VALUE = rf"(?:{_DIGITS}(?:\.\d+)?|(?<!\.)\.\d+)(?:[eE][-+]?\d+)?"
_BELOW = rf"(?: ?/ ?[-+]?{_DIGITS}(?:\.\d+)?)?%?"
_NUMBER = re.compile(rf"(?<!\w)(?<!\d\.)[-+\u2212]?{_VALUE}{_BELOW}")


def exact(completion: str, answer: str) -> float:
    """1.0 if the completion is the answer, white space at both ends aside."""
    return float(completion.strip() == answer.strip())


def numeric(completion: str, answer: str) -> float:
    """1.0 if the last number of the completion equals the answer's last number, to a relative 1e-6.

    Numbers may have thousands separators, decimals, an exponent, a fraction bar (3/4) or a percent sign.
    """
    got, want = last_number(completion), last_number(answer)
    return float(
        got is not None and want is not None and math.isclose(got, want, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-9)
    )


def last_number(text: str) -> float | None:
    """The value of the last number in the text; None without one, or where it is not finite (1/0, 1e999)."""
    last = collections.deque(_NUMBER.finditer(text), maxlen=1)
    if not last:
        return None
    number = last[0].group().replace(",", "").replace("\u2212", "-")
    scale = 0.01 if number.endswith("%") else 1.0
    above, _, below = number.rstrip("%").partition("/")
    try:
        value = float(above) / (float(below) if below else 1.0) * scale
    except (ZeroDivisionError, OverflowError):
        return None
    return value if math.isfinite(value) else None


RULES = {"exact": exact, "numeric": numeric}
"""Rules that run inline, by the name that the recipe gives them."""
LIBRARY = {"math": "math-verify", "reasoning_gym": "reasoning-gym"}
"""Rules that are another package's, and run in processes of their own: name -> package."""
MODULES = {"math": "moe_asyncrl.scoring.math_answer:reward", "reasoning_gym": "moe_asyncrl.scoring.gym_answer:reward"}
"""What such a process loads."""
BUILT_IN = (*RULES, *MODULES)
