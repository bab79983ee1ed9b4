"""`moe-asyncrl role trainer`: one rank of the trainer, from its first collective to its last checkpoint."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from moe_asyncrl.buffer.client import BufferClient
from moe_asyncrl.config.capability import detect_capabilities
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.messages import Counters, Cursor, Member
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.train.checkpoint_folder import CheckpointInfo, folder_of, newest_complete, read_info
from moe_asyncrl.train.identity import check_same_run, model_digest, recipe_digest

if TYPE_CHECKING:
    from moe_asyncrl.train.loop import Measure, Publish

log = logging.getLogger(__name__)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What the first rank tells the others before anything else."""

    epoch: int = 0
    problem: str = ""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Step of the checkpoint that all ranks go on from; None to begin."""

    step: int | None


class StopFlag:
    """Set by SIGTERM and SIGINT; read at the boundary of a step."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._set)

    def _set(self, _number: int, _frame: Any) -> None:
        self.asked = True

    def __call__(self) -> bool:
        """Whether the process was asked to stop."""
        return self.asked


def run(folder: RunFolder, recipe: Recipe, index: int) -> int:
    """Run trainer rank `index` until the recipe's steps are done or a signal stops it. Returns 0 either way.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say where the other ranks are. Raises what ends the run badly.
    """
    stop = StopFlag()
    with ExitStack() as resources:
        train(folder, recipe, index, dict(os.environ), stop, resources)
    return 0


def train(
    folder: RunFolder,
    recipe: Recipe,
    index: int,
    environment: Mapping[str, str],
    stop: Callable[[], bool],
    resources: ExitStack,
) -> None:
    """`run` with its surroundings passed in; `resources` closes what it opens."""
    import torch

    from moe_asyncrl.train.build import build_train_state
    from moe_asyncrl.train.parallel import ParallelRuntime
    from moe_asyncrl.weights.lockstep import Lockstep

    torch.set_num_threads(recipe.trainer.threads)
    capabilities = detect_capabilities()
    layout = Layout.of(recipe.trainer)
    runtime = ParallelRuntime.from_environment(capabilities, environment, timeout_s=recipe.trainer.timeout_s)
    if runtime.rank != index:
        raise UserError(f"trainer: RANK is {runtime.rank}, but this is rank {index} of the run")
    resources.callback(runtime.close)
    runtime.setup(layout, seed=recipe.run.seed)
    lockstep = Lockstep(index, layout.world_size)
    client = resources.enter_context(_join(folder, index, lockstep))

    spec = ModelSpec.from_hf(recipe.model.path).with_mtp(recipe.model.mtp)
    state = build_train_state(
        spec,
        layout,
        capabilities,
        recipe.optimizer,
        rank=index,
        dtype=getattr(torch, recipe.model.dtype),
        recompute=recipe.trainer.recompute,
        hf_dir=recipe.model.path,
    )
    log.info("rank %d of layout %s: model and optimizer are there", index, layout)
    try:
        _go(folder, recipe, state, client, lockstep, stop, resources)
    except Exception as error:
        _tell_failure(client, index, error)
        raise


def _join(folder: RunFolder, rank: int, lockstep: Any) -> BufferClient:
    """A client under the run's lease, which the first rank acquires for all."""
    client: BufferClient | None = None
    lease: Lease | None = None
    if rank == 0:
        try:
            client = BufferClient.connect(folder, sender="trainer-0")
            lease = Lease(epoch=client.acquire_lease())
        except UserError as error:
            lease = Lease(problem=str(error))
    lease = lockstep.follow(lease, Lease)
    if lease.problem:
        raise UserError(lease.problem)
    return client or BufferClient.connect(folder, sender=f"trainer-{rank}", epoch=lease.epoch)


def _go(
    folder: RunFolder,
    recipe: Recipe,
    state: Any,
    client: BufferClient,
    lockstep: Any,
    stop: Callable[[], bool],
    resources: ExitStack,
) -> None:
    from moe_asyncrl.train import checkpoint
    from moe_asyncrl.train.loop import TrainRun, reinforce, save_once, supervised_loop, warm_up
    from moe_asyncrl.train.reference import open_reference
    from moe_asyncrl.train.saver import CheckpointSaver
    from moe_asyncrl.weights.agree import agree

    first = state.model.rank == 0
    with agree("reading the recipe's files"):
        digest = recipe_digest(recipe)
    shape = model_digest(state.model.spec)
    start, cursor, counters = 0, Cursor(), Counters()
    found = _newest(folder, first, lockstep) if recipe.run.resume else None
    if found is not None:
        with agree("resuming"):
            check_same_run(found[1], recipe_digest=digest, model_digest=shape, folder=found[0])
        info = checkpoint.load(state, found[0])
        start, cursor, counters = info.step, info.cursor, info.counters
        log.info("resumed after step %d from %s", start, found[0])

    def describe(step: int, cursor: Cursor, counters: Counters) -> CheckpointInfo:
        return CheckpointInfo(
            step=step,
            version=step,
            adam_steps=checkpoint.adam_steps(state.optimizer),
            cursor=cursor,
            counters=counters,
            seed=recipe.run.seed,
            recipe_digest=digest,
            layout=str(state.model.layout),
            model=shape,
        )

    saver = CheckpointSaver(
        state, folder.checkpoints, describe, recipe.checkpoint, folder.events, stall_s=recipe.trainer.timeout_s
    )
    work = TrainRun(
        recipe=recipe,
        folder=folder,
        state=state,
        client=client,
        lockstep=lockstep,
        stop_asked=stop,
        saver=saver,
        cursor=cursor,
        counters=counters,
        saved=None if found is None else start,
    )
    supervised = recipe.algorithm.objective == "sft"
    if supervised or (found is None and recipe.warmup.steps > 0):
        examples = _examples(recipe, state, first)
        resources.callback(examples.close)
        if not supervised and warm_up(work, examples) == "stopped":
            return
    if first:
        client.begin(start, cursor, counters)
    if supervised:
        if first:
            client.set_phase("running")
        supervised_loop(work, examples, start=start)
    else:
        work.reference = open_reference(recipe, folder, state.model, fresh=found is None)
        publish, work.measure, rest = _engines(folder, recipe, state, client, first, stop, resources)
        work.publish = publish
        work.rest = rest if recipe.engine.colocated else None
        publish(start)
        if found is None and recipe.warmup.steps > 0 and recipe.checkpoint.every > 0:
            save_once(work, start)  # a resume must not warm up again
        reinforce(work, start=start)
    if first:
        client.set_phase("finishing")


def _newest(folder: RunFolder, first: bool, lockstep: Any) -> tuple[Path, CheckpointInfo] | None:
    """The newest complete checkpoint as the first rank sees it: on a shared disk another one may see another."""
    from moe_asyncrl.weights.agree import agree

    newest = newest_complete(folder.checkpoints) if first else None
    step = lockstep.follow(Found(step=None if newest is None else newest[1].step), Found).step
    if step is None:
        return None
    path = folder_of(folder.checkpoints, step)
    with agree(f"reading {path}"):
        return path, read_info(path)


def _examples(recipe: Recipe, state: Any, first: bool) -> Any:
    from moe_asyncrl.models.tokenizer import Tokenizer
    from moe_asyncrl.train.sft import Examples
    from moe_asyncrl.weights.agree import agree

    with agree("reading the supervised examples"):
        return Examples(
            recipe.warmup.data or recipe.data.train,
            Tokenizer.load(recipe.model.path, state.model.spec),
            max_context=recipe.model.max_context,
            seed=recipe.run.seed,
            shuffle=recipe.data.shuffle,
            chat=recipe.data.chat,
            check_all=first,
        )


def _engines(
    folder: RunFolder,
    recipe: Recipe,
    state: Any,
    client: BufferClient,
    first: bool,
    stop: Callable[[], bool],
    resources: ExitStack,
) -> tuple[Publish, Measure | None, Callable[[], None]]:
    """(publish, probe, rest) on this rank."""
    from moe_asyncrl.engine.client import EngineClient
    from moe_asyncrl.engine.copy_weights import copy_weights
    from moe_asyncrl.engine.keys import ensure_engine_key
    from moe_asyncrl.train.probe import Probe
    from moe_asyncrl.train.publish import Publisher
    from moe_asyncrl.train.served_form import served_form
    from moe_asyncrl.weights.backend import choose_transport

    model = state.model
    spec: ModelSpec = model.spec
    key = ensure_engine_key(folder.keys)

    def connect(member: Member) -> EngineClient:
        return EngineClient.of(member, spec, key)

    async def copy(source: Member, target: Member) -> None:
        backend = choose_transport(recipe.weights.backend, source.nccl, {target.name: target.nccl})
        async with connect(source) as giver, connect(target) as taker:
            await copy_weights(
                giver,
                taker,
                host=urlsplit(source.url).hostname or "127.0.0.1",
                deadline_s=recipe.weights.timeout_s,
                backend=backend,
            )

    joins: BufferClient | None = None
    if first:
        joins = resources.enter_context(BufferClient.connect(folder, sender="trainer-0-joins", epoch=client.epoch))
    publisher = Publisher(
        model.chunks,
        spec,
        model.layout,
        model.rank,
        weights=recipe.weights,
        engine=recipe.engine,
        connect=connect if first else None,
        control=client if first else None,
        events=folder.events if first else None,
        stop=stop,
        epoch=client.epoch,
        folder=folder.path / "weights",
        join_control=joins,
        copy=copy if first else None,
        coder=served_form(Path(recipe.model.path), resources),
    )
    resources.callback(publisher.close)
    if recipe.replay.probe_every == 0:
        return publisher.publish, None, publisher.rest
    prompts: list[list[int]] = []
    if first:
        prompts = _probe_prompts(recipe, spec)
    probe = Probe(
        model, recipe, prompts=prompts, state=client.state if first else None, connect=connect if first else None
    )
    return publisher.publish, probe.measure, publisher.rest


def _probe_prompts(recipe: Recipe, spec: ModelSpec) -> list[list[int]]:
    """The first prompts that training samples from, as ids; of several sources, the first of each by its weight."""
    from itertools import islice

    from moe_asyncrl.data.sources.opening import open_prompts
    from moe_asyncrl.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(recipe.model.path, spec)
    prompts = open_prompts(
        recipe.data.train, use="train", seed=recipe.run.seed, limit=recipe.replay.probe_prompts, every_row=False
    )
    try:
        return [tokenizer.encode_prompt(p, recipe.data.chat) for p in islice(prompts, len(prompts))]
    finally:
        prompts.close()


def _tell_failure(client: BufferClient, rank: int, error: Exception) -> None:
    """Let the other roles know; the process ends in any case, so a buffer that does not answer is passed over."""
    if rank != 0:
        return
    try:
        client.set_phase("failed", f"trainer: {error}"[:500])
    except Exception as second:
        log.warning("the buffer was not told of the failure: %s", second)
