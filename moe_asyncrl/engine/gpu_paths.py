"""The engine's GPU-only paths as small checks, run by `moe_asyncrl.cluster.gpu_check` in a process of their own.

The same code runs with a CPU engine over gloo, in float32 and with the tolerance that goes with it.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_asyncrl.config.capability import Capabilities, process_group_backend
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.trajectory import SamplingParams
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.engine.command import EngineArgs
from moe_asyncrl.engine.completion import GenerateRequest, RoutingShape
from moe_asyncrl.engine.ports import free_port
from moe_asyncrl.engine.server import Server
from moe_asyncrl.models.gpu_reference import next_token_logprobs, save_tiny_model
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.shards import rank_shards
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.attempt import Attempt, Held, Ways
from moe_asyncrl.weights.backend import Transport
from moe_asyncrl.weights.channels import Channels
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.failure import EnginesFailed
from moe_asyncrl.weights.loop_thread import LoopThread
from moe_asyncrl.weights.orders import Answer, AnyOrder
from moe_asyncrl.weights.rank_side import RankSide, Settings

START_S, CALL_S = 80.0, 20.0
BUCKET_BYTES = 1 << 20
BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE = 5e-2, 1e-5
STALE_FACTOR = 10.0
"""How many tolerances apart the answers of old and new weights must at least be, or the check shows nothing."""


def _dtype(capabilities: Capabilities) -> str:
    return "bfloat16" if capabilities.cuda else "float32"


def tolerance(capabilities: Capabilities) -> float:
    """Of the mean absolute difference of log-probabilities: single tokens may route differently in bfloat16."""
    return BFLOAT16_TOLERANCE if capabilities.cuda else FLOAT32_TOLERANCE


def start(
    capabilities: Capabilities, folder: Path, gpu: int, *, colocated: bool = False, max_total_tokens: int = 4096
) -> Server:
    """A server on one GPU, or on the CPU."""
    args = EngineArgs(
        model=str(folder),
        port=free_port(),
        python=sys.executable,
        dtype=_dtype(capabilities),
        max_total_tokens=max_total_tokens,
        colocated=colocated,
        max_running_requests=16,
        mem_fraction=0.3,
        weight_version=0,
        extra_env={"CUDA_VISIBLE_DEVICES": str(gpu)} if capabilities.cuda else {},
    )
    return Server.start(args, cpu=not capabilities.cuda, log_path=folder / "engine.log")


def client_of(server: Server, spec: ModelSpec) -> EngineClient:
    """That asks for routed experts."""
    return EngineClient(server.url, routing=RoutingShape.of(spec))


async def difference(client: EngineClient, models: Sequence[Any], version: int) -> list[float]:
    """Mean absolute difference of sampled log-probabilities from each of the transformers models."""
    prompts = [list(range(3 + i, 20 + 3 * i)) for i in range(4)]
    sampling = SamplingParams(temperature=1.0, max_new_tokens=24)
    requests = [
        GenerateRequest(rid=f"{version}-{i}", input_ids=ids, sampling=sampling, version=version, ignore_eos=True)
        for i, ids in enumerate(prompts)
    ]
    completions = await client.generate(requests, deadline_s=CALL_S)
    sums, count = [0.0] * len(models), 0
    for ids, completion in zip(prompts, completions, strict=True):
        if set(completion.versions.tolist()) != {version}:
            raise UserError(f"tokens carry versions {sorted(set(completion.versions.tolist()))}, expected {version}")
        if completion.experts is None or len(completion.experts) != len(ids) + len(completion.output_ids) - 1:
            raise UserError("the engine returned no routing row for some token")
        sampled = torch.from_numpy(completion.logprobs).double()
        tokens = torch.tensor([*ids, *completion.output_ids.tolist()])
        for number, model in enumerate(models):
            expected = next_token_logprobs(model, tokens)[len(ids) - 1 :]
            sums[number] += float((sampled - expected).abs().sum())
        count += len(sampled)
    return [total / count for total in sums]


def check(found: float, capabilities: Capabilities, what: str) -> str:
    """The evidence. Raises UserError if `found` is more than the tolerance."""
    allowed = tolerance(capabilities)
    if not found <= allowed:
        raise UserError(f"{what}: mean difference of log-probabilities {found:.2e}, allowed {allowed:.0e}")
    return f"{what}: mean difference of log-probabilities {found:.1e}, allowed {allowed:.0e}"


def serve(capabilities: Capabilities) -> str:
    """SGLang starts with our arguments and plugin, samples with routing rows, and agrees with transformers."""

    async def run(server: Server, model: Any, spec: ModelSpec) -> float:
        async with client_of(server, spec) as client:
            return (await difference(client, [model], 0))[0]

    with tempfile.TemporaryDirectory() as name:
        model = save_tiny_model(Path(name))
        with start(capabilities, Path(name), gpu=0) as server:
            server.wait_ready(START_S)
            return check(
                asyncio.run(run(server, model, ModelSpec.from_hf(name))), capabilities, "engine against transformers"
            )


class LoneTrainer:
    """A trainer of one rank that has only weights: it leads whole updates of one engine, as a real one does."""

    def __init__(self, client: EngineClient, folder: Path, capabilities: Capabilities) -> None:
        """`folder`: HF directory of the weights. On a GPU they lie there."""
        dtype = getattr(torch, _dtype(capabilities))
        spec, device = ModelSpec.from_hf(folder), "cuda" if capabilities.cuda else "cpu"
        parameters = megatron_parameters(spec, hf_tensors(folder, dtype), device)
        self._client = client
        self._backend: Transport = process_group_backend(capabilities)
        settings = Settings(
            dtype=dtype,
            bucket_bytes=BUCKET_BYTES,
            roots_per_stage=1,
            timeout_s=CALL_S,
            keep_copies=False,
            max_fraction=1.0,
        )
        self._side = RankSide(spec, Layout(), 0, lambda: parameters, settings)
        self.loop = LoopThread("weights")
        self._channels = Channels(self.loop, self._command, host="127.0.0.1", timeout_s=CALL_S)

    def publish(self, version: int) -> None:
        """One whole update. Raises UserError."""
        ways = Ways(
            transport="broadcast",
            backend=self._backend,
            depth=2,
            timeout_s=CALL_S,
            pause_mode="in_place",
            max_fraction=1.0,
            folder="",
        )
        attempt = Attempt(
            [self._client],
            [EngineLayout()],
            ways,
            loop=self.loop,
            command=self._command,
            side=self._side,
            stop=None,
            channels=self._channels,
            epoch=1,
            version=version,
            watch=lambda phase: None,
        )
        try:
            attempt.run(Held(), changes=False, slices=False)
        except UserError as error:
            attempt.recover(EnginesFailed({}, str(error)))
            raise
        unanswered = self.loop.call(attempt.engines.resume([self._client]))
        if unanswered:
            raise UserError(f"the engine did not go on after the update: {unanswered}")

    def close(self) -> None:
        """Leave the group, and close the client."""
        self._channels.drop([self._client])
        self._side.close()
        self.loop.call(self._client.close())
        self.loop.close()

    def _command(self, order: AnyOrder) -> list[Answer]:
        answer = self._side.do(order)
        if answer.problem:
            raise UserError(answer.problem)
        self._side.agreed(order, [answer])
        return [answer]


def megatron_parameters(spec: ModelSpec, tensors: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """What a trainer of one rank would hold."""
    found = {}
    for shard in rank_shards(spec, Layout(), 0):
        blocks = shard.blocks
        local = torch.zeros(shard.shape, dtype=tensors[blocks[0].hf.name].dtype, device=device)
        for block in blocks:
            local[block.local_slices] = block.to_local(tensors[block.hf.name][block.hf_slices]).to(device)
        found[shard.entry.name] = local
    return found


def hf_tensors(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of an HF directory by their checkpoint names."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    return found


def update(capabilities: Capabilities) -> str:
    """An update over the group's backend turns the engine's weights into another model's, and into nothing else."""

    def run(server: Server, models: Sequence[Any], folder: Path) -> list[float]:
        client = client_of(server, ModelSpec.from_hf(folder))
        trainer = LoneTrainer(client, folder, capabilities)
        try:
            trainer.publish(1)
            return trainer.loop.call(difference(client, models, 1))
        finally:
            trainer.close()

    with tempfile.TemporaryDirectory() as name:
        old, new = Path(name) / "old", Path(name) / "new"
        models = [save_tiny_model(old, seed=0), save_tiny_model(new, seed=1)]
        with start(capabilities, old, gpu=1) as server:
            server.wait_ready(START_S)
            stale, found = run(server, models, new)
    if stale < STALE_FACTOR * tolerance(capabilities):
        raise UserError(f"old and new weights answer alike ({stale:.2e}), so the check shows nothing")
    return (
        check(found, capabilities, "engine after the update against the new model")
        + f"; the old one is {stale:.1f} away"
    )
