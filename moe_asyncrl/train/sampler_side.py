"""What the sampler said of a trajectory's tokens, checked, as the loss compares with it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from moe_asyncrl.data.trajectory import SamplingMask
from moe_asyncrl.data.validate import ContractViolation, check_mask
from moe_asyncrl.data.wire import TrajectoryHeader, check_root
from moe_asyncrl.data.wire import check_mask as mask_of_header

FIELDS = ("loss_mask", "logprobs", "support_logprobs", "sampling_mask.indptr", "sampling_mask.ids")
"""Wire fields that are read here, besides the tokens."""


def sampler_side(
    header: TrajectoryHeader, arrays: Mapping[str, np.ndarray], *, vocabulary: int, temperature: float | None
) -> tuple[npt.NDArray[np.float32], SamplingMask | None]:
    """Log-probabilities float32 [T] of the sampled tokens, and the ids that truncation kept; None if it never did.

    A token that was sampled from a part of the vocabulary has its log-probability inside that part.

    Args:
        header: of the trajectory.
        arrays: `tokens` and `FIELDS`, as far as the trajectory has them.
        vocabulary: ids of the model.
        temperature: what the trainer divides logits by; None leaves it unchecked.

    Raises:
        ContractViolation: masks do not fit their tokens or are those of others, or tokens were sampled at another
            temperature; names the trajectory and the token.
    """
    name, tokens, sampled, logprobs = (
        header.identity.trajectory,
        arrays["tokens"],
        arrays["loss_mask"],
        arrays["logprobs"],
    )
    for s in header.segments:
        other = s.sampling is not None and temperature is not None and s.sampling.temperature != temperature
        if other and s.sampling is not None and sampled[s.start : s.end].any():
            raise ContractViolation(
                f"trajectory {name}: tokens {s.start} to {s.end - 1} were sampled at temperature "
                f"{s.sampling.temperature:g}, the recipe's rollout.temperature is {temperature:g}"
            )
    mask = mask_of_header(header, arrays)
    if mask is not None:
        check_root(header, tokens)
    support = arrays.get("support_logprobs")
    check_mask(name, tokens, sampled, logprobs, header.segments, mask, support, vocabulary=vocabulary)
    return logprobs if support is None else np.where(np.isnan(support), logprobs, support), mask
