"""From prompts to requests, and from completions to groups: pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.messages import Ticket
from moe_asyncrl.data.trajectory import Identity, Trajectory
from moe_asyncrl.engine.completion import Completion, GenerateRequest, sampling_params
from moe_asyncrl.models.tokenizer import Tokenizer
from moe_asyncrl.rollout.assemble import assemble
from moe_asyncrl.rollout.prompts import ReadyPrompt
from moe_asyncrl.scoring.score import ENTRY, TOTAL, Score, ScoreJob

MIN_SAMPLES = 2
"""A group-relative advantage compares samples: fewer have none."""


@dataclasses.dataclass(frozen=True)
class GroupWork:
    """One ticket and the prompt instance it stands for."""

    ticket: Ticket
    prompt: ReadyPrompt


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one group. `trajectories` go to the buffer if `fate` is None, else the ticket is given back."""

    fate: Literal["failed", "filtered"] | None
    reason: str
    trajectories: tuple[Trajectory, ...]
    failed: int
    """Samples without a score; they are left out, never scored 0."""


def trajectory_name(ticket: Ticket, sample: int) -> str:
    """Unique in a run, resumes included: each lease has its own epoch."""
    return f"{ticket.epoch}-{ticket.index}-{ticket.attempt}-{sample}"


def requests_for(
    recipe: Recipe, work: GroupWork, version: int, stop: tuple[int, ...], *, vocabulary: int
) -> list[GenerateRequest]:
    """`group_size` requests for one group; they share the prompt."""
    sampling = sampling_params(recipe.rollout, work.prompt.max_new_tokens, vocabulary)
    return [
        GenerateRequest(
            rid=trajectory_name(work.ticket, sample),
            input_ids=work.prompt.ids,
            sampling=sampling,
            version=version,
            stop_token_ids=stop,
            ignore_eos=recipe.rollout.ignore_eos,
        )
        for sample in range(recipe.rollout.group_size)
    ]


def usable(completion: Completion) -> bool:
    """False for a sample that the engine cut off: its end is not the policy's."""
    return len(completion.output_ids) > 0 and completion.finish_reason in ("stop", "length")


def jobs_for(prompt: ReadyPrompt, completions: Sequence[Completion], tokenizer: Tokenizer) -> list[ScoreJob]:
    """What the scorer is asked, in order."""
    p = prompt.prompt
    text = p.text
    metadata = p.metadata if p.entry is None else {**p.metadata, ENTRY: p.entry}
    return [ScoreJob(text, tokenizer.decode(c.output_ids.tolist()), p.answer, metadata, p.reward) for c in completions]


def group_outcome(
    recipe: Recipe,
    work: GroupWork,
    completions: Sequence[Completion],
    scores: Sequence[Score],
    scorer_version: str,
    *,
    vocabulary: int,
) -> Outcome:
    """The group of the usable, scored samples.

    It fails with fewer than two of them; it is filtered by `rollout.filter_uniform`. `completions` are all of the
    group's, in order; `scores` are those of the usable ones among them, in order.
    """
    good = [(i, c) for i, c in enumerate(completions) if usable(c)]
    scored = [(i, c, s) for (i, c), s in zip(good, scores, strict=True) if s.status == "ok"]
    failed = len(completions) - len(scored)
    if len(scored) < MIN_SAMPLES:
        return Outcome("failed", _why(completions, scores), (), failed)
    if recipe.rollout.filter_uniform and len({s.rewards[TOTAL] for _, _, s in scored}) == 1:
        return Outcome("filtered", f"all rewards are {scored[0][2].rewards[TOTAL]:g}", (), failed)
    prompt, ticket = work.prompt, work.ticket
    sampling = sampling_params(recipe.rollout, prompt.max_new_tokens, vocabulary)
    metadata = prompt.prompt.metadata_text()
    if prompt.prompt.answer is not None:
        metadata["answer"] = prompt.prompt.answer
    trajectories = tuple(
        assemble(
            prompt.ids,
            c,
            identity=Identity(
                trajectory=trajectory_name(ticket, i),
                prompt=prompt.prompt.source,
                index=ticket.index,
                attempt=ticket.attempt,
                sample=i,
                epoch=ticket.epoch,
            ),
            sampling=sampling,
            rewards=s.rewards,
            score_status={prompt.prompt.reward or recipe.reward.function: s.report(scorer_version)},
            metadata=metadata,
        )
        for i, c, s in scored
    )
    return Outcome(None, "", trajectories, failed)


def _why(completions: Sequence[Completion], scores: Sequence[Score]) -> str:
    bad = [s for s in scores if s.status != "ok"]
    if bad:
        return f"{len(bad)} of {len(completions)} samples could not be scored; the last: {bad[-1].detail}"
    cut = [c for c in completions if not usable(c)]
    if cut:
        return (
            f"{len(cut)} of {len(completions)} samples were cut off ({cut[-1].finish_reason}: {cut[-1].finish_detail})"
        )
    return f"only {len(completions)} samples"
