"""The reward `math`: 1.0 where math-verify finds the completion's last answer equal to the reference, else 0.0.

It runs in the reward's own processes, which `reward.timeout_s` ends: math-verify's timeouts are signals, work on a main
thread only, and are off here. Loaded by name there; nothing else imports this module, as sympy takes seconds.

**What is compared.** math-verify extracts an answer from the completion: what stands in the last `\\boxed{}` (boxes
within a few words of each other are a set), else LaTeX between dollars, else the last expression or number. A
completion without any is wrong (0.0). The reference may be LaTeX with or without delimiters (`\\frac{3}{4}`, `$x^2$`),
a number, or a worked solution that ends in `\\boxed{…}` or, as in GSM8K, in `#### 72`. A reference in which nothing can
be read fails the score: it is never a reward of 0.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from math_verify import parse, verify

_DELIMITED = re.compile(r"\\boxed|\$|\\\(|\\\[")
_SENTENCE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}\s+[a-zA-Z]{2,}(?![a-zA-Z])")
_GSM8K = "####"


class UnreadableReference(ValueError):
    """Nothing to compare with: the fault is the data's, not the completion's."""


def reward(prompt: str, completion: str, answer: str | None, metadata: dict[str, Any]) -> float:
    """1.0 or 0.0. Raises UnreadableReference where `answer` has no value."""
    want = reference(answer or "")
    got = parse(completion, parsing_timeout=None)
    return float(bool(got) and verify(list(want), got, timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def reference(answer: str) -> tuple[Any, ...]:
    """What math-verify reads in a reference, first its value. Raises UnreadableReference."""
    # It warns at every call that its timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    text = answer.rpartition(_GSM8K)[2].strip()
    bare = text and not _DELIMITED.search(text) and not _SENTENCE.search(text)
    found = tuple(parse(f"\\boxed{{{text}}}" if bare else text, parsing_timeout=None)) if text else ()
    if not found:
        raise UnreadableReference(f"the answer {answer[:80]!r} is nothing that math-verify can read")
    return found
