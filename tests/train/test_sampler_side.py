"""What the trainer takes from the sampler: inside masks where there are any, and nothing that does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from moe_asyncrl.data.trajectory import SamplingParams, Trajectory
from moe_asyncrl.data.validate import ContractViolation
from moe_asyncrl.data.wire import arrays_of, encode
from moe_asyncrl.train.sampler_side import sampler_side
from tests.data.test_validate import MASKED, T, segments_of

Arrays = dict[str, np.ndarray]


def taken(t: Trajectory, change: Callable[[Arrays], None] = lambda _: None, temperature: float = 0.7) -> tuple:
    """What the trainer reads of `t`, whose arrays were changed after it was sealed."""
    arrays = {name: np.array(a) for name, a in arrays_of(t).items()}
    change(arrays)
    return sampler_side(encode(t)[0], arrays, vocabulary=1010, temperature=temperature)


def test_a_truncated_token_has_its_logprob_inside_the_mask_and_others_over_everything() -> None:
    logprobs, mask = taken(MASKED)
    assert mask is not None and mask.ids.tolist() == MASKED.sampling_mask.ids.tolist()
    np.testing.assert_array_equal(logprobs, MASKED.support_logprobs)
    whole, none = taken(T, temperature=1.0)
    assert none is None
    np.testing.assert_array_equal(whole, T.logprobs)
    # One trajectory may hold both: a turn with truncation and one without.
    first, second = T.segments[1], segments_of(SamplingParams(temperature=0.7))["segments"][1]
    cut = len(T.tokens) - 2
    assert MASKED.sampling_mask is not None and MASKED.support_logprobs is not None
    indptr = np.minimum(MASKED.sampling_mask.indptr, MASKED.sampling_mask.indptr[cut])
    mixed = dataclasses.replace(
        MASKED,
        segments=(
            T.segments[0],
            type(first)(start=first.start, end=cut, role="policy", sampling=MASKED.segments[1].sampling),
            type(first)(start=cut, end=first.end, role="policy", sampling=second.sampling),
        ),
        sampling_mask=type(MASKED.sampling_mask)(indptr, MASKED.sampling_mask.ids[: indptr[-1]]),
        support_logprobs=np.where(np.arange(len(T.tokens)) < cut, MASKED.support_logprobs, np.nan).astype(np.float32),
    )
    logprobs, _ = taken(mixed)
    np.testing.assert_array_equal(logprobs[:cut], MASKED.support_logprobs[:cut])
    np.testing.assert_array_equal(logprobs[cut:], T.logprobs[cut:])


def test_tokens_of_another_temperature_are_refused() -> None:
    with pytest.raises(ContractViolation, match=r"trajectory 0\.0\.0: tokens 4 to 7 .*temperature 0\.7, .* is 0\.8"):
        taken(MASKED, temperature=0.8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a["sampling_mask.ids"].__setitem__(0, 0), "sampling mask does not belong"),
        (lambda a: a.pop("sampling_mask.ids"), "sampling mask does not belong"),
        (lambda a: a["tokens"].__setitem__(0, 5), "do not belong to these tokens"),
        (lambda a: a["support_logprobs"].__setitem__(6, np.nan), "token 6: must be a number"),
        (lambda a: a.pop("support_logprobs"), "nothing without each other"),
    ],
    ids=["ids", "no ids", "tokens", "no number", "no numbers"],
)
def test_what_was_changed_on_the_way_is_refused(change: Callable[[Arrays], None], message: str) -> None:
    with pytest.raises(ContractViolation, match=rf"trajectory 0\.0\.0: .*{message}"):
        taken(MASKED, change)


def test_a_mask_sealed_with_a_token_outside_is_refused_with_its_place() -> None:
    assert MASKED.sampling_mask is not None
    ids = MASKED.sampling_mask.ids.copy()
    ids[2] -= 1
    planted = dataclasses.replace(MASKED, sampling_mask=dataclasses.replace(MASKED.sampling_mask, ids=ids))
    with pytest.raises(ContractViolation, match=r"trajectory 0\.0\.0: sampling_mask: token 5 .*outside its mask"):
        taken(planted)
