"""The trainer-sampler KL with routing replayed and live, on tokens that the trainer's current weights sampled.

Measured right after a commit, while no newer weights exist: the first rank has the engine answer a fixed set of
prompts, then all ranks score the answers twice. An answer with a token of any other version, or without the routing
rows of a model that routes, is left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from moe_asyncrl.algorithms.kl import k3
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import EngineLost, UserError
from moe_asyncrl.data.messages import Member, RunState
from moe_asyncrl.data.trajectory import SamplingMask
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.engine.completion import Completion, GenerateRequest, sampling_params
from moe_asyncrl.replay.controller import Mode, ReplayStats
from moe_asyncrl.train.batch import Sample
from moe_asyncrl.train.passes import ModelOnRank
from moe_asyncrl.train.routing import RoutingCounts, routing_counts
from moe_asyncrl.train.score import score
from moe_asyncrl.weights.lockstep import Lockstep

log = logging.getLogger(__name__)

LONGEST_ANSWER = 64
"""Tokens; enough to meet every router often, short enough not to hold up the trainer."""
ANSWER_DEADLINE_S = 120.0


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One completion, as it goes to the other ranks."""

    prompt: int
    tokens: bytes
    logprobs: bytes
    """Inside the mask where there is one."""
    kept: tuple[bytes, bytes]
    """Offsets and ids of the sampling mask of the sampled tokens; empty where nothing was truncated."""
    experts: bytes
    rows: tuple[int, ...]
    """Shape of `experts`; empty for a dense model."""
    dtype: str


class _Answers(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, or why there are none."""

    answers: tuple[_Answer, ...]
    problem: str = ""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one probe found."""

    kl_replay: float | None
    """Mean k3 between sampler and trainer with routing replayed, in nats a token; None for a dense model."""
    kl_live: float
    """The same with the trainer's own routing."""
    tokens: int
    """Sampled tokens that both are means over."""
    routing: RoutingCounts | None
    """Both sides' routing, from the live pass; None for a dense model."""


def measure(
    model: ModelOnRank,
    samples: Sequence[Sample],
    *,
    temperature: float,
    allow_missing: bool,
    micro_batch_tokens: int,
) -> Measured:
    """Score the samples with routing replayed and live, and compare with their sampler. Collective.

    The live pass has the sampler's rows at hand, so that it also counts in what the two routings differ.

    Raises:
        ReplayMismatch: routing rows do not fit, or are missing without permission.
    """

    def scored(mode: Mode) -> tuple[float, ReplayStats | None]:
        found, stats = score(
            model,
            samples,
            temperature=temperature,
            mode=mode,
            allow_missing=allow_missing,
            micro_batch_tokens=micro_batch_tokens,
        )
        each = [
            k3(
                torch.from_numpy(s.sampler_logprobs[s.trained]).double(),  # type: ignore[index]
                torch.from_numpy(ours[s.trained]).double(),
            )
            for s, ours in zip(samples, found, strict=True)
        ]
        return float(torch.cat(each).mean()), stats

    kl_replay: float | None = None
    routing: RoutingCounts | None = None
    if model.router_shape is None:
        kl_live, _ = scored("off")
    else:
        kl_replay, _ = scored("replay")
        kl_live, stats = scored("observe")
        assert stats is not None
        routing = routing_counts(stats, model.spec, model.device)
    return Measured(
        kl_replay=kl_replay, kl_live=kl_live, tokens=sum(int(s.trained.sum()) for s in samples), routing=routing
    )


class Probe:
    """One per trainer rank; all ranks make the same calls."""

    def __init__(
        self,
        model: ModelOnRank,
        recipe: Recipe,
        *,
        prompts: Sequence[Sequence[int]] = (),
        state: Callable[[], RunState] | None = None,
        connect: Callable[[Member], EngineClient] | None = None,
    ) -> None:
        """`prompts` (token ids), `state` and `connect` are for the first rank only.

        `connect` makes a client that asks for routed experts.
        """
        self._model, self._recipe = model, recipe
        self._prompts, self._state, self._connect = prompts, state, connect
        self._lockstep = Lockstep(model.rank, model.layout.world_size, None)

    def measure(self, version: int) -> Measured | None:
        """Sample and measure, on all ranks; None if no engine answered.

        Collective. The committed version must be `version`, and the trainer's weights those.
        """
        mine: _Answers | None = None
        if self._model.rank == 0:
            try:
                mine = self._sample(version)
            except (UserError, EngineLost) as error:
                mine = _Answers(answers=(), problem=str(error))
        found = self._lockstep.follow(mine, _Answers)
        if not found.answers:
            if self._model.rank == 0:
                why = found.problem or "no answer is of that version alone"
                log.warning("the KL against version %d was not measured: %s", version, why)
            return None
        return measure(
            self._model,
            [_sample(i, a) for i, a in enumerate(found.answers)],
            temperature=self._recipe.rollout.temperature,
            allow_missing=self._recipe.replay.allow_missing,
            micro_batch_tokens=self._recipe.trainer.micro_batch_tokens,
        )

    def _sample(self, version: int) -> _Answers:
        """The engine's answers, on the first rank. Raises `UserError` or `EngineLost`."""
        assert self._state is not None and self._connect is not None
        members = [m for m in self._state().members if m.state == "serving" and m.version == version]
        if not members:
            raise UserError(f"no engine serves version {version}")
        rollout = self._recipe.rollout
        longest = min(rollout.max_new_tokens, LONGEST_ANSWER)
        sampling = sampling_params(rollout, longest, self._model.spec.vocab_size)
        requests = [
            GenerateRequest(rid=f"probe-{version}-{i}", input_ids=ids, sampling=sampling, version=version)
            for i, ids in enumerate(self._prompts)
        ]
        client = self._connect(members[0])

        async def ask() -> list[Completion]:
            async with client:
                return await client.generate(requests, deadline_s=ANSWER_DEADLINE_S, mask=sampling.truncates)

        done = asyncio.run(ask())
        whole = [
            (r, c)
            for r, c in zip(requests, done, strict=True)
            if len(c.output_ids)
            and bool((c.versions == version).all())
            # What was aborted while it waited has no rows.
            and (c.experts is not None or self._model.router_shape is None)
        ]
        return _Answers(answers=tuple(_answer(r, c) for r, c in whole))


def _answer(request: GenerateRequest, completion: Completion) -> _Answer:
    experts, mask = completion.experts, completion.mask
    logprobs = completion.logprobs if completion.support_logprobs is None else completion.support_logprobs
    tokens = np.concatenate([np.asarray(request.input_ids, dtype=np.int32), completion.output_ids])
    return _Answer(
        prompt=len(request.input_ids),
        tokens=tokens.astype("<i4").tobytes(),
        logprobs=logprobs.astype("<f4").tobytes(),
        kept=(b"", b"") if mask is None else (mask.indptr.astype("<i8").tobytes(), mask.ids.astype("<i4").tobytes()),
        experts=b"" if experts is None else experts.tobytes(),
        rows=() if experts is None else experts.shape,
        dtype="|u1" if experts is None else experts.dtype.str,
    )


def _sample(number: int, a: _Answer) -> Sample:
    tokens = np.frombuffer(a.tokens, dtype="<i4")
    trained = np.arange(len(tokens)) >= a.prompt
    logprobs = np.full(len(tokens), np.nan, dtype=np.float32)
    logprobs[trained] = np.frombuffer(a.logprobs, dtype="<f4")
    offsets, ids = (np.frombuffer(part, dtype=kind) for part, kind in zip(a.kept, ("<i8", "<i4"), strict=True))
    offsets = np.concatenate([np.zeros(a.prompt, dtype=np.int64), offsets])
    return Sample(
        name=f"probe-{number}",
        tokens=tokens,
        trained=trained,
        sampler_logprobs=logprobs,
        mask=SamplingMask(offsets, ids) if len(ids) else None,
        experts=np.frombuffer(a.experts, dtype=np.dtype(a.dtype)).reshape(a.rows) if a.rows else None,
    )
