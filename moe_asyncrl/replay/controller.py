"""Replay: routers take the experts that they are given, and every row is used exactly once in each pass.

Megatron-Core's router asks the object in `router.router_replay` for its top-k (`get_replay_topk`). Upstream's own
object holds one target at a time and needs its action switched between forward and recomputation, which a pipeline
schedule never does. Ours is a pair of queues for each router: the forward pass takes from the first; if the layer is
recomputed, the row moves to the second, and the recomputation takes it from there. Recomputation runs with gradients
enabled, the checkpointed forward pass without, so no schedule has to tell us which of the two it is.

`observe` queues rows in the same way but routes live: it counts how far the trainer's own choice is from the rows.
`record` routes live and keeps what was chosen, micro-batch by micro-batch, so that a later pass can replay it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from moe_asyncrl.replay.rows import Owner, ReplayMismatch, check_rows, name_of

Mode = Literal["off", "replay", "observe", "record"]
TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class LayerStats:
    """Counts of one pass in one MoE layer on this rank, padding excluded. A decision is one token there."""

    layer: int
    """Number among the MoE layers of the whole model."""
    decisions: int
    flipped: int
    """Decisions in which today's router would have chosen another set of experts than its row has."""
    missing: int
    """Decisions left to today's router because their row is missing."""
    given: Tensor | None = None
    """Tokens of each expert by the rows, int64 [experts]; only after `observe`."""
    own: Tensor | None = None
    """Tokens of each expert by today's router, for the same tokens; only after `observe`."""


@dataclasses.dataclass(frozen=True)
class ReplayStats:
    """Counts of one pass on this rank, by MoE layer; the sums are over layers."""

    layers: tuple[LayerStats, ...]

    @property
    def decisions(self) -> int:
        """Decisions of this rank's routers."""
        return sum(each.decisions for each in self.layers)

    @property
    def flipped(self) -> int:
        """Decisions in which today's router would have chosen otherwise."""
        return sum(each.flipped for each in self.layers)

    @property
    def missing(self) -> int:
        """Decisions left to today's router."""
        return sum(each.missing for each in self.layers)


@dataclasses.dataclass
class _Entry:
    """Rows of one micro-batch for one router."""

    rows: Tensor
    known: Tensor
    counted: Tensor
    counted_total: int
    missing_total: int
    all_known: bool
    label: str
    recomputed: bool


class RouterQueue:
    """What stands in `router.router_replay` of one MoE layer."""

    def __init__(self, layer: int, controller: ReplayController) -> None:
        self.layer = layer
        self._controller = controller
        self.forward: deque[_Entry] = deque()
        self.recompute: deque[_Entry] = deque()
        self.recorded: list[Tensor] = []
        """int32 [tokens, topk] of each micro-batch, in mode `record`."""
        self.clear()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Megatron-Core's hook: scores [tokens, experts] -> scores and indices of the chosen, [tokens, topk]."""
        assert default_compute_topk is not None

        def live() -> tuple[Tensor, Tensor]:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        c = self._controller
        if c.mode == "off":
            return live()
        if c.mode == "record":
            chosen = live()
            if not c.again:
                self.recorded.append(chosen[1].to(torch.int32))
            return chosen
        entry, first = self._next(scores.shape[0])
        indices = entry.rows.to(device=scores.device, dtype=torch.int64)
        if indices.shape != (scores.shape[0], topk):
            raise ReplayMismatch(
                f"{entry.label}, MoE layer {self.layer}, rank {c.rank}: {list(indices.shape)} experts given for "
                f"{scores.shape[0]} tokens with {topk} experts each"
            )
        if c.mode == "observe":
            chosen = live()
            if first:
                self._account(entry, chosen[1], indices)
                self._weigh(entry, chosen[1], indices)
            return chosen
        own: Tensor | None = None
        if first:
            with torch.no_grad():
                own = live()[1]
            self._account(entry, own, indices)
        if not entry.all_known:
            own = live()[1] if own is None else own
            indices = torch.where(entry.known.to(scores.device)[:, None], indices, own)
        return scores.gather(1, indices), indices

    def _next(self, tokens: int) -> tuple[_Entry, bool]:
        """The rows for this call, and whether it is the micro-batch's first pass through the router."""
        c = self._controller
        again = c.again
        queue = self.recompute if again else self.forward
        if not queue:
            raise ReplayMismatch(
                f"MoE layer {self.layer}, rank {c.rank}: the router was called for {tokens} tokens in the "
                f"{'recomputation' if again else 'forward pass'}, but no rows are left for it"
            )
        entry = queue.popleft()
        if not again and entry.recomputed:
            self.recompute.append(entry)
        return entry, not again

    def _account(self, entry: _Entry, own: Tensor, given: Tensor) -> None:
        counted = entry.counted.to(own.device)
        differs = (own.sort(-1).values != given.sort(-1).values).any(-1)
        known = entry.known.to(own.device)
        self._flips.append((differs & known & counted).sum())
        self._decisions += entry.counted_total
        self._missing += entry.missing_total

    def _weigh(self, entry: _Entry, own: Tensor, given: Tensor) -> None:
        """Count tokens by expert on both sides: those that have a row and are no padding."""
        on = (entry.known & entry.counted).to(own.device)
        loads = [torch.bincount(side[on].flatten(), minlength=self._controller.num_experts) for side in (given, own)]
        self._loads.append(torch.stack(loads))

    def stats(self) -> LayerStats:
        """What was counted so far (synchronises with the device)."""
        given, own = torch.stack(self._loads).sum(0).cpu() if self._loads else (None, None)
        return LayerStats(
            layer=self.layer,
            decisions=self._decisions,
            flipped=int(torch.stack(self._flips).sum()) if self._flips else 0,
            missing=self._missing,
            given=given,
            own=own,
        )

    def clear(self) -> None:
        """Forget rows and counts."""
        self.forward.clear()
        self.recompute.clear()
        self.recorded.clear()
        self._decisions = self._missing = 0
        self._flips: list[Tensor] = []
        self._loads: list[Tensor] = []


class ReplayController:
    """All routers of one trainer rank.

    `routers` are pairs of (global MoE layer, Megatron router) for the layers that this rank owns. `recompute` says that
    the routers run again in the backward pass.
    """

    def __init__(
        self,
        routers: Sequence[tuple[int, Any]],
        *,
        num_experts: int,
        experts_per_token: int,
        recompute: bool,
        rank: int = 0,
    ) -> None:
        self.mode: Mode = "off"
        self.recompute = recompute
        self.rank = rank
        self.num_experts = num_experts
        self._top_k = experts_per_token
        self._queues = [RouterQueue(layer, self) for layer, _ in routers]
        for queue, (_, router) in zip(self._queues, routers, strict=True):
            router.router_replay = queue

    @property
    def layers(self) -> tuple[int, ...]:
        """Global numbers of this rank's MoE layers."""
        return tuple(q.layer for q in self._queues)

    @property
    def again(self) -> bool:
        """Whether a router that is called now is called for the second time: layers that are recomputed run without
        gradients at first."""
        return self.recompute and torch.is_grad_enabled()

    def push(
        self,
        rows: Tensor,
        known: Tensor,
        owners: Sequence[Owner],
        *,
        backward: bool = True,
        counted: Tensor | None = None,
        allow_missing: bool = False,
    ) -> None:
        """Queue one micro-batch: integer rows [tokens, this rank's MoE layers, K] and known bool [tokens] of the tokens
        that this rank routes, in the order in which its routers see them.

        `backward` is False for a forward-only pass. `counted` bool [tokens] leaves padding out of the statistics.
        Raises `ReplayMismatch` for rows that cannot be (shape, range, duplicates) or are missing without permission.
        """
        if rows.shape[1:] != (len(self._queues), self._top_k):
            raise ReplayMismatch(
                f"rank {self.rank}: rows of {list(rows.shape[1:])} given, this rank has {len(self._queues)} MoE layers "
                f"{list(self.layers)} with {self._top_k} experts a token"
            )
        if not allow_missing and not bool(known.all()):
            token = int((~known).nonzero()[0])
            raise ReplayMismatch(
                f"{name_of(owners, token)}, MoE layers {list(self.layers)}, rank {self.rank}: the routing is missing; "
                "set replay.allow_missing to route it live"
            )
        check_rows(rows, known, owners, num_experts=self.num_experts, layers=self.layers, rank=self.rank)
        counted = torch.ones_like(known) if counted is None else counted
        label = ", ".join(f"trajectory {o.name}" for o in owners[:3]) + (" and more" if len(owners) > 3 else "")
        total, missing, all_known = int(counted.sum()), int((counted & ~known).sum()), bool(known.all())
        again = self.recompute and backward
        for i, queue in enumerate(self._queues):
            queue.forward.append(_Entry(rows[:, i], known, counted, total, missing, all_known, label, again))

    def take_recorded(self, micro_batches: int) -> list[Tensor]:
        """After a pass in mode `record`: int32 [tokens, this rank's MoE layers, K] of each micro-batch, on the CPU.

        Raises `ReplayMismatch` naming layer and rank if a router was not called once for each; forgets them either way.
        """
        try:
            for q in self._queues:
                if len(q.recorded) != micro_batches:
                    raise ReplayMismatch(
                        f"MoE layer {q.layer}, rank {self.rank}: the router was called {len(q.recorded)} times for "
                        f"{micro_batches} micro-batches, so its choice cannot be replayed"
                    )
            if not self._queues:
                return [torch.zeros((0, 0, self._top_k), dtype=torch.int32)] * micro_batches
            return [torch.stack([q.recorded[i] for q in self._queues], dim=1).cpu() for i in range(micro_batches)]
        finally:
            for q in self._queues:
                q.recorded.clear()

    def finish(self) -> ReplayStats:
        """End a pass: every row must have been used once forward, and once in recomputation where there is one.

        Raises `ReplayMismatch` naming layer, rank and the first row left over; clears the queues either way.
        """
        try:
            for q in self._queues:
                for kind, left in (("forward", q.forward), ("recomputation", q.recompute)):
                    if left:
                        raise ReplayMismatch(
                            f"MoE layer {q.layer}, rank {self.rank}: rows of {len(left)} micro-batches were never used "
                            f"in the {kind} pass, the first for {left[0].label}"
                        )
            return ReplayStats(tuple(q.stats() for q in self._queues))
        finally:
            for q in self._queues:
                q.clear()
