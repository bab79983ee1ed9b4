"""The rollout worker: tickets in, groups out.

Lists of groups go to the engines as one request each; their completions are scored, assembled and sent to the buffer.
The buffer's tickets are the only backpressure: a group is sampled only under a ticket, and every ticket ends as a
group that the buffer acknowledged or is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from moe_asyncrl.buffer.aio import AsyncBufferClient
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import EngineLost, StaleEpoch, UserError
from moe_asyncrl.data.messages import RunState, Ticket
from moe_asyncrl.data.validate import validate
from moe_asyncrl.data.wire import Blocks
from moe_asyncrl.engine.completion import Completion, GenerateRequest
from moe_asyncrl.engine.errors import EngineRefused, MalformedReply
from moe_asyncrl.models.tokenizer import Tokenizer
from moe_asyncrl.rollout.groups import GroupWork, group_outcome, jobs_for, requests_for, usable
from moe_asyncrl.rollout.prompts import ReadyPrompts
from moe_asyncrl.rollout.rates import Rates
from moe_asyncrl.rollout.resume import continuation, joined, may_go_on
from moe_asyncrl.scoring.scorer import Scorer
from moe_asyncrl.telemetry.jsonl import JsonlWriter
from moe_asyncrl.telemetry.spans import span

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Engines that one list is tried on before its tickets are given back."""
MAX_FAILED_LISTS = 16
"""Lists in a row that no engine completed: then the fault is not the list's."""
ABANDON_S = 10.0


class Engines(Protocol):
    """What the worker asks of the engine pool."""

    async def generate_anywhere(
        self,
        group: Sequence[GenerateRequest],
        *,
        deadline_s: float,
        attempts: int = 3,
        wait_s: float = 0.0,
        mask: bool = False,
    ) -> list[Completion]: ...


class Worker:
    """Samples groups until it is stopped. One event loop; scoring by user functions happens in other processes."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        name: str,
        prompts: ReadyPrompts,
        tokenizer: Tokenizer,
        scorer: Scorer,
        buffer: AsyncBufferClient,
        engines: Engines,
        events: JsonlWriter,
        num_experts: int | None,
        vocabulary: int,
        blocks: Blocks = (),
        on_state: Callable[[RunState], None],
    ) -> None:
        """`on_state` hears of every state that comes with tickets. `num_experts` bounds the ids in routing rows, and
        `vocabulary` those in sampling masks. `blocks`: the MoE layers of each of the trainer's pipeline stages."""
        self._recipe, self._name = recipe, name
        self._prompts, self._tokenizer, self._scorer = prompts, tokenizer, scorer
        self._buffer, self._engines, self._events = buffer, engines, events
        self._num_experts, self._vocabulary, self._on_state = num_experts, vocabulary, on_state
        self._blocks = blocks
        self._order = prompts.order(seed=recipe.run.seed, shuffle=recipe.data.shuffle)
        self._held: set[Ticket] = set()
        self._lists: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._failed_lists = 0
        self._wait_engine_s = recipe.engine.start_timeout_s + recipe.weights.timeout_s
        self.rates = Rates()

    async def sample(self, stop: asyncio.Event) -> None:
        """Sample until `stop` is set, then give back every ticket whose group is not finished.

        Raises UserError for what ends the run: a reward that keeps failing, engines that keep failing, a silent buffer.
        """
        stopping = asyncio.ensure_future(stop.wait())
        try:
            while not stop.is_set():
                self._raise_failure()
                self._wake.clear()
                free = self._recipe.rollout.concurrent_groups - len(self._held)
                pause: float | None = None
                if free > 0:
                    reply = await self._buffer.ask_tickets(free)
                    self._on_state(reply.state)
                    self._start(reply.tickets)
                    if len(reply.tickets) < free:
                        pause = max(reply.retry_after, 0.02)
                wake = asyncio.ensure_future(self._wake.wait())
                await asyncio.wait({wake, stopping}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                wake.cancel()
        finally:
            stopping.cancel()
            await self._abandon()
        self._raise_failure()

    def _start(self, tickets: Sequence[Ticket]) -> None:
        size = self._recipe.rollout.groups_per_request
        for i in range(0, len(tickets), size):
            part = tickets[i : i + size]
            self._held.update(part)
            task = asyncio.create_task(self._list(part))
            self._lists.add(task)
            task.add_done_callback(lambda _: self._wake.set())

    def _raise_failure(self) -> None:
        done = [t for t in self._lists if t.done()]
        self._lists.difference_update(done)
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _abandon(self) -> None:
        running = [t for t in self._lists if not t.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        # The buffer may be what failed: what it does not hear of in time, it takes back by itself.
        with contextlib.suppress(TimeoutError, UserError):
            async with asyncio.timeout(ABANDON_S):
                for ticket in tuple(self._held):
                    await self._give_back(ticket, "unused", "the worker stopped", 0)

    # --- one list of groups --------------------------------------------------------------------------------------

    async def _list(self, tickets: Sequence[Ticket]) -> None:
        work = [GroupWork(t, self._prompts[self._order.at(t.index)[1]]) for t in tickets]
        stop = self._tokenizer.eos_ids
        requests = [r for w in work for r in requests_for(self._recipe, w, -1, stop, vocabulary=self._vocabulary)]
        try:
            completions = await self._go_on(requests, await self._generate(requests))
        except (EngineLost, EngineRefused, MalformedReply) as error:
            await self._list_failed(tickets, error)
            return
        self._failed_lists = 0
        size = self._recipe.rollout.group_size
        await asyncio.gather(*(self._finish(w, completions[i * size : (i + 1) * size]) for i, w in enumerate(work)))

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        self.rates.running += len(requests)
        try:
            with span(self._events, self._name, "generate", requests=len(requests)) as fields:
                completions = await self._engines.generate_anywhere(
                    requests,
                    deadline_s=self._recipe.engine.request_timeout_s,
                    attempts=ATTEMPTS,
                    wait_s=self._wait_engine_s,
                    mask=all(r.sampling.truncates for r in requests),
                )
                lengths = [len(c.output_ids) for c in completions]
                fields |= {"engine": completions[0].engine, "tokens": sum(lengths), "start": completions[0].submitted}
        finally:
            self.rates.running -= len(requests)
        self.rates.sampled(lengths)
        return completions

    async def _go_on(self, requests: Sequence[GenerateRequest], done: Sequence[Completion]) -> list[Completion]:
        """Send what an engine cut off again, with its partial answer as part of the prompt, until it is whole."""
        whole = list(done)
        for attempt in range(1, ATTEMPTS):
            cut = [i for i, (r, c) in enumerate(zip(requests, whole, strict=True)) if may_go_on(r, c)]
            if not cut:
                break
            try:
                more = await self._generate([continuation(requests[i], whole[i], attempt) for i in cut])
            except (EngineLost, EngineRefused, MalformedReply) as error:
                log.warning("%d samples stay cut off: %s", len(cut), error)
                break
            for i, rest in zip(cut, more, strict=True):
                whole[i] = joined(requests[i], whole[i], rest)
        return whole

    async def _list_failed(self, tickets: Sequence[Ticket], error: Exception) -> None:
        log.warning("%d groups were not sampled: %s", len(tickets), error)
        self._failed_lists += 1
        for ticket in tickets:
            self.rates.groups_failed += 1
            await self._give_back(ticket, "failed", str(error)[:500], 0)
        if self._failed_lists >= MAX_FAILED_LISTS:
            raise UserError(f"{self._failed_lists} generation requests in a row failed; the last one: {error}")

    async def _finish(self, work: GroupWork, completions: Sequence[Completion]) -> None:
        good = [c for c in completions if usable(c)]
        scores = await self._scorer.score(jobs_for(work.prompt, good, self._tokenizer))
        self.rates.scored(scores)
        outcome = group_outcome(
            self._recipe,
            work,
            completions,
            scores,
            self._scorer.version(work.prompt.prompt.reward),
            vocabulary=self._vocabulary,
        )
        self.rates.failed += outcome.failed
        if outcome.fate is not None:
            if outcome.fate == "failed":
                log.warning("group %d (attempt %d) failed: %s", work.ticket.index, work.ticket.attempt, outcome.reason)
                self.rates.groups_failed += 1
            else:
                self.rates.groups_filtered += 1
            await self._give_back(work.ticket, outcome.fate, outcome.reason[:500], len(completions))
            return
        for trajectory in outcome.trajectories:
            validate(trajectory, num_experts=self._num_experts, vocabulary=self._vocabulary)
        try:
            result = await self._buffer.put_group(
                work.ticket, outcome.trajectories, outcome.failed, blocks=self._blocks
            )
        except StaleEpoch as error:
            log.info("group %d is dropped: %s", work.ticket.index, error)
        else:
            self.rates.groups_held += result.held
            if not result.held:
                log.info("group %d was not taken: %s", work.ticket.index, result.reason)
        self._held.discard(work.ticket)
        self._wake.set()

    async def _give_back(
        self, ticket: Ticket, fate: Literal["failed", "filtered", "unused"], reason: str, trajectories: int
    ) -> None:
        with contextlib.suppress(StaleEpoch):  # void under the new lease: there is nothing to give back
            await self._buffer.return_ticket(ticket, fate, reason, trajectories)
        self._held.discard(ticket)
        self._wake.set()
