"""The choice of transport, as a value."""

from __future__ import annotations

import pytest

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.weights.backend import choose_transport


@pytest.mark.parametrize(
    ("wanted", "own", "engines", "chosen"),
    [
        ("auto", "", {"engine-0": ""}, "gloo"),
        ("auto", "2.27.3", {"engine-0": "2.27.3", "engine-1": "2.27.3"}, "nccl"),
        ("auto", "2.27.3", {"engine-0": "2.27.3", "engine-1": "2.26.2"}, "gloo"),
        ("auto", "2.27.3", {"engine-0": ""}, "gloo"),
        ("gloo", "2.27.3", {"engine-0": "2.27.3"}, "gloo"),
        ("nccl", "2.27.3", {"engine-0": "2.27.3"}, "nccl"),
    ],
)
def test_chosen(wanted: str, own: str, engines: dict[str, str], chosen: str) -> None:
    """Both ways."""
    assert choose_transport(wanted, own, engines) == chosen


@pytest.mark.parametrize(
    ("own", "engines", "message"),
    [
        ("2.27.3", {"engine-0": "2.26.2"}, "engine-0 has 2.26.2"),
        ("", {"engine-0": "2.26.2"}, "the trainer has no NCCL"),
        ("2.27.3", {"engine-1": ""}, "engine-1 has no NCCL"),
    ],
)
def test_nccl_that_cannot_be_had_is_an_error(own: str, engines: dict[str, str], message: str) -> None:
    """Asked for by name, it is not replaced in silence."""
    with pytest.raises(UserError, match=message):
        choose_transport("nccl", own, engines)
