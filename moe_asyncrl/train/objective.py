"""What is minimised: log-probabilities of a micro-batch -> its part of the loss, and what is measured along the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_asyncrl.algorithms.kl import Estimator, k3, kl_estimate
from moe_asyncrl.algorithms.policy_loss import policy_terms
from moe_asyncrl.algorithms.supervised import supervised_loss
from moe_asyncrl.train.batch import MicroBatch
from moe_asyncrl.train.metrics import MicroBatchTerms

POLICY_SUMS = ("loss", "tokens", "ratio", "clipped", "importance", "capped", "logprob_gap", "k3")
POLICY_MAXIMA = ("ratio", "importance", "logprob_gap")
REFERENCE_SUMS = ("kl_reference", "reference_tokens")
SUPERVISED_SUMS = ("loss", "tokens")


class Objective(Protocol):
    """Loss of one micro-batch. The token weights of a whole batch sum to 1, so losses of micro-batches just add."""

    @property
    def temperature(self) -> float:
        """What logits are divided by."""
        ...

    @property
    def policy(self) -> bool:
        """Whether there is a sampler to compare with."""
        ...

    def __call__(self, logprobs: Tensor, batch: MicroBatch) -> tuple[Tensor, MicroBatchTerms]:
        """`logprobs` float32 [n] -> the scalar loss and detached terms."""
        ...


@dataclass(frozen=True)
class PolicyObjective:
    """Clipped policy loss against the old policy, with the truncated importance weight against the sampler.

    Where the micro-batch has log-probabilities of a reference, `kl_coef` times the estimated KL(policy || reference) of
    each token is added to its loss (GRPO, arXiv 2402.03300, equations 3 and 4).
    """

    clip_low: float
    clip_high: float
    importance_cap: float
    temperature: float
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    policy: bool = True

    def __call__(self, logprobs: Tensor, batch: MicroBatch) -> tuple[Tensor, MicroBatchTerms]:
        """Without log-probabilities of the old policy in the batch, today's policy is the old one: the ratio is 1."""
        new = torch.where(batch.trained, logprobs, 0.0)
        old = new.detach() if batch.old_logprobs is None else torch.where(batch.trained, batch.old_logprobs, 0.0)
        sampler = batch.sampler_logprobs
        terms = policy_terms(
            new,
            old,
            sampler,
            batch.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            importance_cap=self.importance_cap,
        )
        loss = (terms.loss * batch.weights).sum()
        frozen = batch.reference_logprobs
        if frozen is not None:
            frozen = torch.where(batch.trained, frozen, 0.0)
            if self.kl_coef > 0:
                loss = loss + self.kl_coef * (kl_estimate(new, frozen, self.kl_estimator) * batch.weights).sum()
        with torch.no_grad():
            on = batch.trained.float()
            gap = (new - sampler).abs()
            capped = (old - sampler).exp() > self.importance_cap if self.importance_cap > 0 else torch.zeros_like(on)
            columns = (terms.ratio, terms.clipped.float(), terms.importance, capped.float(), gap, k3(sampler, new))
            names: tuple[str, ...] = POLICY_SUMS
            sums = [loss, on.sum(), *((c * on).sum() for c in columns)]
            if frozen is not None:
                names, sums = names + REFERENCE_SUMS, [*sums, (k3(new, frozen) * on).sum(), on.sum()]
            maxima = torch.stack([(c * on).max() for c in (terms.ratio, terms.importance, gap)])
        return loss, MicroBatchTerms(names, torch.stack(sums), POLICY_MAXIMA, maxima)


@dataclass(frozen=True)
class SupervisedObjective:
    """Negative log-likelihood of the trained tokens."""

    temperature: float = 1.0
    policy: bool = False

    def __call__(self, logprobs: Tensor, batch: MicroBatch) -> tuple[Tensor, MicroBatchTerms]:
        """The weighted sum over trained tokens."""
        loss = (supervised_loss(torch.where(batch.trained, logprobs, 0.0)) * batch.weights).sum()
        with torch.no_grad():
            sums = torch.stack([loss, batch.trained.sum()])
        return loss, MicroBatchTerms(SUPERVISED_SUMS, sums)
