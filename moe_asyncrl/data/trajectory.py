"""What travels from the sampler to the trainer: the trajectory (the contract of docs/architecture.md).

Notation: T tokens, L MoE layers (a dense layer has no row), K experts per token. What is not known is absent or
marked `missing`; it is never filled with zeros, because zero is a valid expert, token and reward.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

SCHEMA = 2
"""Number of the wire contract. A reader refuses any other."""

RoutingSource = Literal["sampled", "prefilled", "cached", "missing"]
ScoreStatus = Literal["ok", "failed", "timeout"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the policy sampled. `top_k` 0 means no limit, `top_p` 1 and `min_p` 0 mean no truncation."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 0

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary, so that each has a sampling mask."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) written by one role: a turn of a user, an agent or a tool, a fork of another trajectory."""

    start: int
    end: int
    role: Literal["system", "user", "policy", "tool", "other"]
    agent: str | None = None
    sampling: SamplingParams | None = None
    """Set where the policy sampled."""
    parent: str | None = None
    """The trajectory this one was forked from."""
    fork_position: int | None = None


class RoutingRun(msgspec.Struct, frozen=True, kw_only=True):
    """Rows [start, end) of the T-1 routing rows that share a version and a source."""

    start: int
    end: int
    version: int
    """Weights that routed the rows; -1 where not known."""
    source: RoutingSource


class PolicyAsked(msgspec.Struct, frozen=True, kw_only=True):
    """The policy that was asked for (not what answered: that is `weight_version`, per token)."""

    base_version: int
    adapter: str | None = None
    adapter_version: int | None = None


class ScorerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one scorer said. `value` is None unless the status is `ok`: a failure is never a reward of zero."""

    status: ScoreStatus
    value: float | None = None
    scorer_version: str = ""
    detail: str = ""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Enough to find, replay and account for a trajectory."""

    trajectory: str
    prompt: str
    """Where the prompt came from: file and line, or the source's own id."""
    index: int
    """Prompt instance: the position in the run's endless, seeded order of prompts."""
    attempt: int = 0
    sample: int = 0
    """Position in the group."""
    episode: str | None = None
    engine: str = ""
    epoch: int = 0
    finish_reason: str = ""
    submitted: float = 0.0
    """Unix time in seconds."""
    finished: float = 0.0


@dataclasses.dataclass(frozen=True)
class SamplingMask:
    """Token ids that truncation kept, in CSR form: those of token t are `ids[indptr[t]:indptr[t + 1]]`, rising.

    A token that the policy did not sample, or sampled from the whole vocabulary, has none.
    """

    indptr: npt.NDArray[np.int64]
    """int64 [T + 1]"""
    ids: npt.NDArray[np.int32]
    """int32 [nnz]"""


@dataclasses.dataclass(frozen=True)
class StepRewards:
    """Process rewards: `values[i]` is earned at token `positions[i]`."""

    positions: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class TeacherTopK:
    """A teacher's k likeliest tokens at every position."""

    ids: npt.NDArray[np.int32]
    """int32 [T, k]"""
    values: npt.NDArray[np.float32]
    """float32 [T, k], log-probabilities"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One sampled sequence with everything that the trainer needs to know of how it was sampled."""

    identity: Identity
    policy: PolicyAsked
    segments: tuple[Segment, ...]
    tokens: npt.NDArray[np.int32]
    """int32 [T]: the prompt and everything after it."""
    loss_mask: npt.NDArray[np.bool_]
    """bool [T]: true where the policy sampled the token."""
    logprobs: npt.NDArray[np.float32]
    """float32 [T]: full-vocabulary log-softmax at the sampling temperature; NaN where not sampled."""
    weight_version: npt.NDArray[np.int32]
    """int32 [T]: the version that sampled the token; -1 where not sampled."""
    support_logprobs: npt.NDArray[np.float32] | None = None
    """float32 [T]: renormalised inside the sampling mask; NaN for tokens without one, None where no token has one."""
    routing_experts: npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | None = None
    """uint8 or uint16 [T - 1, L, K]: logical expert ids in the engine's order; None for a dense model."""
    routing_runs: tuple[RoutingRun, ...] = ()
    sampling_mask: SamplingMask | None = None
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    """Only scores whose status is `ok`; `rewards["total"]` is what training uses."""
    score_status: dict[str, ScorerReport] = dataclasses.field(default_factory=dict)
    step_rewards: StepRewards | None = None
    teacher_logprobs: npt.NDArray[np.float32] | None = None
    """float32 [T]"""
    teacher_topk: TeacherTopK | None = None
    teacher_version: str | None = None
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    """Small things for people (the answer, a task name); nothing that training reads."""

    @property
    def length(self) -> int:
        """Tokens in the trajectory."""
        return int(self.tokens.shape[0])

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token; -1 if none was sampled."""
        sampled = self.weight_version[self.loss_mask]
        return int(sampled.min()) if sampled.size else -1


@dataclasses.dataclass(frozen=True)
class Group:
    """The samples of one prompt instance; advantages are relative to it."""

    index: int
    attempt: int
    trajectories: tuple[Trajectory, ...]


@dataclasses.dataclass(frozen=True)
class Episode:
    """Trajectories of several agents or turns that share one outcome. Groups of episodes are built from it.

    On the wire an episode is its trajectories, each with the episode's name in its identity and its own segments.
    """

    episode: str
    trajectories: tuple[Trajectory, ...]
