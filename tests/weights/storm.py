"""The proof under a storm of updates: what is checked of every reply, and the errors that must be caught."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.weights.flow import STALE, Reply
from tests.weights.lived import EDGE, Pass, Span, judge, labels_hold, read, spans_of
from tests.weights.mix import Mixed, mix_of

TOLERANCE = 1e-5
PLANTED = 100 * TOLERANCE
ENOUGH = 4
"""Tokens of a reply in which a planted error has to show."""
KNIFE = 2e-6
"""Routers in the reference that are this close to a tie, at rows of which the engine says nothing, prove nothing."""


@dataclass
class Account:
    """What a storm came to."""

    replies: int = 0
    tokens: int = 0
    through_updates: int = 0
    """Replies with tokens of several versions"""
    most_versions: int = 0
    cached: int = 0
    """Replies of one version that took a part of their prompt from the prefix cache"""
    stale_key_cached: int = 0
    """Of these: sent with the key of another version"""
    ties: int = 0
    """Replies that are left out, see `KNIFE`"""
    worst: float = 0.0
    worst_rows: float = 0.0
    planted: dict[str, list[float]] = field(default_factory=dict)
    """By kind of error: what each planted one came to"""

    def plant(self, kind: str, value: float) -> None:
        self.planted.setdefault(kind, []).append(value)

    def say(self) -> str:
        """One line."""
        planted = ", ".join(f"{kind} {min(v):.1e} ({len(v)})" for kind, v in sorted(self.planted.items()))
        return (
            f"{self.replies} replies, {self.tokens} tokens, {self.through_updates} through updates (up to "
            f"{self.most_versions} versions), {self.cached} with cached prefixes, {self.ties} left out; "
            f"log-probabilities within {self.worst:.1e}, experts within {self.worst_rows:.1e}; planted: {planted}"
        )


def check_replies(mixed: Mixed, replies: Sequence[Reply], *, keep: bool, plant_every: int = 4) -> Account:
    """Every reply against transformers under the versions that it says; planted errors in every n-th."""
    account = Account()
    order = sorted(replies, key=lambda r: int(r.done.versions[0]))
    for number, reply in enumerate(order):
        done, spans = reply.done, spans_of(reply.done.versions)
        assert done.finish_reason == "length", reply
        assert all(a.version < b.version for a, b in itertools.pairwise(spans)), reply
        assert keep is False or done.retractions == 0
        verdict = judge(mixed, reply.prompt, done, keep=keep)
        if verdict.margin < KNIFE:
            account.ties += 1
            continue
        where = f"{reply.engine} {done.rid}: prompt {len(reply.prompt)}, {spans}, cached {done.cached_tokens}"
        assert verdict.worst <= TOLERANCE, (where, verdict.worst)
        assert verdict.short <= EDGE, (where, verdict.short)
        assert labels_hold(reply.prompt, done), (where, done.row_runs)
        account.replies += 1
        account.tokens += len(done.output_ids)
        account.worst = max(account.worst, verdict.worst)
        account.worst_rows = max(account.worst_rows, verdict.short)
        account.through_updates += len(spans) > 1
        account.most_versions = max(account.most_versions, len(spans))
        cached = len(spans) == 1 and done.cached_tokens > 0
        account.cached += cached
        account.stale_key_cached += cached and spans[0].version != STALE
        if number % plant_every == 0 and len(done.output_ids) >= ENOUGH:
            _plant(mixed, reply, spans, account, keep=keep)
    assert account.ties <= max(1, len(replies) // 50), account
    return account


def _plant(mixed: Mixed, reply: Reply, spans: Sequence[Span], account: Account, *, keep: bool) -> None:
    done = reply.done
    if spans[0].version < 1:
        return
    off = [Span(s.version - 1, s.start, s.end) for s in spans]
    wrong = judge(mixed, reply.prompt, done, keep=keep, spans=off)
    account.plant("labels off by one", wrong.worst)
    if len(spans) > 1 and spans[-1].end - spans[-1].start >= ENOUGH:
        first = spans[-1].start
        account.plant("the other policy", judge(mixed, reply.prompt, done, keep=not keep).logprobs[first:].max())
        late = [
            *spans[:-2],
            Span(spans[-2].version, spans[-2].start, first + 1),
            Span(spans[-1].version, first + 1, spans[-1].end),
        ]
        account.plant(
            "a switch one token late", judge(mixed, reply.prompt, done, keep=keep, spans=late).logprobs[first]
        )
    if len(spans) > 1:
        return
    version = spans[0].version
    ids = [*reply.prompt, *map(int, done.output_ids)]
    last, p = len(ids) - 1, len(reply.prompt)
    new, old = mix_of(version), mix_of(version - 1)
    for group in range(len(new.amounts)):
        if new.amounts[group] != old.amounts[group]:
            seen = read(mixed, ids, [Pass(new.with_group(group, old), 0, last)])
            account.plant("weights of two versions", float(np.abs(seen.logprobs[p - 1 :] - done.logprobs).max()))
            break
    if 0 < done.cached_tokens < p:
        passes = [Pass(old, 0, done.cached_tokens), Pass(new, done.cached_tokens, last)]
        seen = read(mixed, ids, passes)
        account.plant("a prefix of the version before", float(np.abs(seen.logprobs[p - 1 :] - done.logprobs).max()))


def check_times(replies: Sequence[Reply], updates: Sequence[dict[str, Any]]) -> None:
    """No reply is of a version that was not there yet, or of one that was over when the request came."""
    for reply in replies:
        versions = reply.done.versions
        over = max((u["version"] for u in updates if u["ended"] < reply.began), default=-1)
        begun = max((u["version"] for u in updates if u["began"] < reply.ended), default=-1)
        assert over <= int(versions.min()) and int(versions.max()) <= begun, (reply, over, begun)
