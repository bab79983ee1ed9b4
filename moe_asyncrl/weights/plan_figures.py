"""What a plan costs, as numbers: bytes of each rank, buckets, messages, seconds at least."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moe_asyncrl.weights.links import LINKS
from moe_asyncrl.weights.plan import Plan
from moe_asyncrl.weights.trainer_blocks import Ints

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class Spread:
    """Bytes of the ranks of one side."""

    min: int
    mean: float
    max: int

    @classmethod
    def of(cls, values: Ints) -> Spread:
        """Of one value for each rank."""
        return cls(int(values.min()), float(values.mean()), int(values.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Sizes in bytes, times in seconds."""

    mode: str
    trainer_ranks: int
    engines: int
    engine_ranks: int
    model_bytes: int
    """Of all HF tensors, once."""
    buckets: int
    largest_bucket: int
    groups: int
    """Process groups: one for each trainer rank that sends to engines."""
    broadcasts: int
    messages: int
    """From one rank to one other: to the root of a bucket, or to an engine rank."""
    sent: Spread
    """To engines, by each trainer rank."""
    sent_at_best: float
    """What the busiest could not be below: bytes over ranks, of a whole pipeline stage, or of what only some of its
    ranks hold."""
    gathered: Spread
    """To other trainer ranks, by each trainer rank."""
    received: Spread
    """By each engine rank."""
    seconds_at_least: dict[str, float]
    """By link; see `links`."""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def figures(plan: Plan) -> Figures:
    """The figures of a plan that has passed its check."""
    d, s, ranks = plan.deliveries, plan.sends, plan.layout.world_size
    copies = np.array([len(numbers) for numbers in plan.receiver_numbers], np.int64)[d.receivers]
    contents = np.bincount(plan.parts.bucket, plan.part_nbytes, len(plan.bucket_nbytes)).astype(np.int64)
    nbytes = send_nbytes(plan)
    gathered_by, gathered_at = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    sent = np.zeros(ranks, np.int64)
    if plan.mode == "broadcast":
        alone = 0.0  # any rank can be the root
        np.add.at(sent, d.root, contents[d.bucket])
        root = d.root[s.delivery]
        away = s.source != root
        np.add.at(gathered_by, s.source[away], nbytes[away])
        np.add.at(gathered_at, root[away], nbytes[away])
        broadcasts, messages = len(d.bucket), int(away.sum())
    else:
        np.add.at(sent, s.source, nbytes * copies[s.delivery])
        sets, inverse = np.unique(s.holder, return_inverse=True)
        shares = np.bincount(inverse, nbytes * copies[s.delivery])
        holders = plan.blocks.holders
        alone = max(n / len(holders.ranks(int(h))) for h, n in zip(sets, shares, strict=True))
        broadcasts, messages = 0, int(copies[s.delivery].sum())
    able = ranks // plan.layout.pp
    if plan.mode == "broadcast" and plan.roots_per_stage:
        able = min(able, plan.roots_per_stage)
    received = np.zeros(int(plan.engine_starts[-1]), np.int64)
    for bucket, receivers in zip(d.bucket, d.receivers, strict=True):
        received[plan.receiver_numbers[receivers]] += contents[bucket]
    busiest = int(max((sent + gathered_by).max(), gathered_at.max(), received.max()))
    return Figures(
        mode=plan.mode,
        trainer_ranks=ranks,
        engines=len(plan.engines),
        engine_ranks=len(received),
        model_bytes=sum(t.numel * int(n) for t, n in zip(plan.tensors, plan.item_bytes, strict=True)),
        buckets=len(plan.bucket_nbytes),
        largest_bucket=int(plan.bucket_nbytes.max()),
        groups=len(plan.senders),
        broadcasts=broadcasts,
        messages=messages,
        sent=Spread.of(sent),
        sent_at_best=max(float(sent.reshape(plan.layout.pp, -1).sum(axis=1).max()) / able, alone),
        gathered=Spread.of(gathered_by),
        received=Spread.of(received),
        seconds_at_least={link.name: link.seconds(busiest) for link in LINKS},
    )


def send_nbytes(plan: Plan) -> Ints:
    """[S] bytes of each send to one receiver: the pieces of its set of ranks in its bucket."""
    holder = plan.blocks.holder[plan.pieces.block]
    width = np.int64(max(int(holder.max()), int(plan.sends.holder.max())) + 1)
    keys, inverse = np.unique(plan.parts.bucket[plan.pieces.part] * width + holder, return_inverse=True)
    total = np.bincount(inverse, plan.piece_nbytes).astype(np.int64)
    return total[np.searchsorted(keys, plan.deliveries.bucket[plan.sends.delivery] * width + plan.sends.holder)]


def lines(plan: Plan, f: Figures) -> list[str]:
    """The figures as a person reads them."""
    layouts = ", ".join(f"{plan.engines.count(layout)} of {layout}" for layout in dict.fromkeys(plan.engines))

    def spread(what: str, s: Spread) -> str:
        return f"{what:<34}{s.min / GIB:>10.3f}{s.mean / GIB:>10.3f}{s.max / GIB:>10.3f}"

    found = [
        f"{plan.spec.family}, {f.model_bytes / GIB:.1f} GiB as {plan.dtype}: {f.mode} from {f.trainer_ranks} trainer "
        f"ranks ({plan.layout}) to {f.engine_ranks} engine ranks ({layouts})",
        f"buckets      {f.buckets}, largest {f.largest_bucket / MIB:.3g} MiB of {plan.bucket_bytes / MIB:g} allowed",
        f"collectives  {f.broadcasts} broadcasts, {f.messages} messages from rank to rank",
        f"groups       {f.groups}, one for each trainer rank that sends to engines",
        "",
        f"{'GiB of a rank':<34}{'min':>10}{'mean':>10}{'max':>10}",
        spread("trainer rank to engines", f.sent),
        spread("trainer rank to trainer ranks", f.gathered),
        spread("engine rank receives", f.received),
        f"The busiest sends {f.sent.max / max(f.sent_at_best, 1):.3f} times what it must at best.",
        "",
        f"{'link of each rank':<34}{'seconds at least':>20}",
    ]
    return found + [f"{name:<34}{seconds:>20.3g}" for name, seconds in f.seconds_at_least.items()]
