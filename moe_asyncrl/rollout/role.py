"""The rollout's process: wait for the run, evaluate, sample until the trainer is done, evaluate once more, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Sequence

import msgspec

from moe_asyncrl.buffer.aio import AsyncBufferClient
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import DeadlineExceeded, EngineLost, UserError
from moe_asyncrl.data.messages import Member, RunState
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.engine.completion import Completion, GenerateRequest
from moe_asyncrl.engine.keys import ensure_engine_key
from moe_asyncrl.engine.pool import EnginePool
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.routing_blocks import routing_blocks
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tokenizer import Tokenizer
from moe_asyncrl.rollout.evaluate import evaluate
from moe_asyncrl.rollout.prompts import ReadyPrompts, eval_prompts, reward_functions, train_prompts
from moe_asyncrl.rollout.worker import ATTEMPTS, Worker
from moe_asyncrl.scoring.scorer import Scorer, search_folders
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.spans import span

log = logging.getLogger(__name__)

STATE_S = 1.0
"""Between two looks at the run's state."""
REPORT_S = 5.0
START_S = 24 * 3600.0
"""Longest wait for the first commit. A supervised warm-up comes before it, and only the trainer knows how long that
takes; the supervisor ends the run at once when the trainer or the last engine fails."""


def run(folder: RunFolder, recipe: Recipe, index: int = 0) -> int:
    """Sample for the run in `folder`.

    Returns 0 when the run is finished or failed elsewhere, and after SIGTERM or SIGINT. Raises UserError for bad
    data, a bad or ever failing reward function, engines or a buffer that do not answer.
    """
    return asyncio.run(_run(folder, recipe, index))


async def _run(folder: RunFolder, recipe: Recipe, index: int) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    scorer = await Scorer.start(recipe.reward, search=search_folders(recipe.reward), functions=reward_functions(recipe))
    try:
        spec = ModelSpec.from_hf(recipe.model.path)
        tokenizer = Tokenizer.load(recipe.model.path, spec)
        key = ensure_engine_key(folder.keys)
        async with (
            await AsyncBufferClient.connect(folder, sender=f"rollout-{index}") as buffer,
            EnginePool(lambda member: EngineClient.of(member, spec, key)) as engines,
        ):
            rollout = Rollout(
                folder,
                recipe,
                index=index,
                spec=spec,
                tokenizer=tokenizer,
                scorer=scorer,
                train=train_prompts(recipe, tokenizer, every_row=False),  # they were looked at before the run
                held_out=eval_prompts(recipe, tokenizer) if index == 0 else None,
                buffer=buffer,
                engines=engines,
                stop=stop,
            )
            await rollout.go()
    finally:
        await scorer.close()
    return 0


def samplable(state: RunState) -> tuple[Member, ...]:
    """The members, with those that do not serve the committed version marked as joining: they get no request."""
    return tuple(
        m if m.state != "serving" or m.version == state.version else msgspec.structs.replace(m, state="joining")
        for m in state.members
    )


def has_engine(state: RunState) -> bool:
    """Some engine serves the committed version."""
    return any(m.state == "serving" for m in samplable(state))


def due(version: int, evaluated: int, every: int) -> bool:
    """True if a multiple of `every` was passed since version `evaluated`; never with `every` 0."""
    return every > 0 and version // every > evaluated // every


class Rollout:
    """One worker with its evaluation, and the run's state that both follow."""

    def __init__(
        self,
        folder: RunFolder,
        recipe: Recipe,
        *,
        index: int,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        scorer: Scorer,
        train: ReadyPrompts,
        held_out: ReadyPrompts | None,
        buffer: AsyncBufferClient,
        engines: EnginePool,
        stop: asyncio.Event,
    ) -> None:
        self._folder, self._recipe, self._name = folder, recipe, f"rollout-{index}"
        self._tokenizer, self._scorer, self._held_out = tokenizer, scorer, held_out
        self._buffer, self._engines = buffer, engines
        self._stop = stop
        """The process is told to end."""
        self._end = asyncio.Event()
        """Sampling ends: the run is finishing or over, or the process is told to end."""
        self._state: RunState | None = None
        self._evaluated = -1
        self._evaluation: asyncio.Task[None] | None = None
        self._worker = Worker(
            recipe,
            name=self._name,
            prompts=train,
            tokenizer=tokenizer,
            scorer=scorer,
            buffer=buffer,
            engines=engines,
            events=folder.events,
            num_experts=spec.num_experts if spec.is_moe else None,
            vocabulary=spec.vocab_size,
            blocks=routing_blocks(spec, Layout.of(recipe.trainer)),
            on_state=self._saw,
        )

    async def go(self) -> None:
        """From the first look at the run to its end. Raises UserError for what ends the run from here."""
        state = await self._wait_until_running()
        if state.phase == "running" and not self._stop.is_set():
            log.info("sampling from version %d", state.version)
            await self._evaluate_now()
            await self._sample()
            state = await self._look()
        if state.phase == "finishing" and not self._stop.is_set() and state.version > self._evaluated:
            await self._evaluate_now()

    async def _wait_until_running(self) -> RunState:
        end = time.monotonic() + START_S
        no_engine_since: float | None = None
        while True:
            state = await self._look()
            if self._stop.is_set() or state.phase in ("finishing", "finished", "failed"):
                return state
            if state.phase == "running":
                if has_engine(state):
                    return state
                no_engine_since = no_engine_since or time.monotonic()
                patience = self._recipe.engine.start_timeout_s + self._recipe.weights.timeout_s
                if time.monotonic() - no_engine_since > patience:
                    raise DeadlineExceeded(
                        f"{self._name} waited {patience:g} s for an engine that serves version {state.version}"
                    )
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"{self._name} waited {START_S:g} s for the trainer to publish its first weights"
                )
            await _within(self._stop, 0.2)

    async def _sample(self) -> None:
        watching = asyncio.create_task(self._watch())
        sampling = asyncio.create_task(self._worker.sample(self._end))
        try:
            await asyncio.wait([watching, sampling], return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                self._end.set()
                watching.result()
            await sampling
        finally:
            self._end.set()
            watching.cancel()
            sampling.cancel()
            await asyncio.gather(watching, sampling, return_exceptions=True)
            await self._drop_evaluation()
            self._folder.metrics.append(self._worker.rates.report())

    async def _watch(self) -> None:
        """Look at the state, report rates, start evaluations when they are due; ends with sampling."""
        reported = time.monotonic()
        while not self._end.is_set():
            state = await self._look()
            if self._evaluation is not None and self._evaluation.done():
                self._evaluation.result()
                self._evaluation = None
            if self._evaluation is None and due(state.version, self._evaluated, self._recipe.eval.every):
                self._evaluation = asyncio.create_task(self._evaluate_now())
            if time.monotonic() - reported >= REPORT_S:
                reported = time.monotonic()
                self._folder.metrics.append({**self._worker.rates.report(), "version": state.version})
            await _within(self._end, STATE_S)

    async def _look(self) -> RunState:
        state = await self._buffer.state()
        self._saw(state)
        return state

    def _saw(self, state: RunState) -> None:
        self._state = state
        self._engines.set_members(samplable(state))
        if state.phase in ("finishing", "finished", "failed") or self._stop.is_set():
            self._end.set()

    # --- evaluation ----------------------------------------------------------------------------------------------

    async def _evaluate_now(self) -> None:
        if self._held_out is None or self._state is None:
            return
        version = self._evaluated = self._state.version
        with span(self._folder.events, self._name, "eval", version=version):
            result = await evaluate(
                self._held_out,
                self._generate,
                self._tokenizer,
                self._scorer,
                version=version,
                tag=f"eval-{self._state.epoch}",
            )
        self._folder.metrics.append(result.metrics())
        log.info("version %d: accuracy %.3f on %d prompts", version, result.accuracy, result.n)

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        e = self._recipe.engine
        try:
            return await self._engines.generate_anywhere(
                requests,
                deadline_s=e.request_timeout_s,
                attempts=ATTEMPTS,
                wait_s=e.start_timeout_s + self._recipe.weights.timeout_s,
            )
        except EngineLost as error:
            raise UserError(f"evaluation: tried {ATTEMPTS} times; the last engine: {error}") from None

    async def _drop_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.cancel()
            with contextlib.suppress(asyncio.CancelledError, UserError):
                await self._evaluation
            self._evaluation = None


async def _within(event: asyncio.Event, seconds: float) -> None:
    """Until the event, or for so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
