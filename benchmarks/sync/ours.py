"""The trainer's side of the benchmark: one rank with Megatron-Core's parameters, and the real publisher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from moe_asyncrl.config.recipe import Engine, Weights
from moe_asyncrl.data.messages import Counters, Member, MemberId, RunState
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec


class OneEngine:
    """The run's state where there is one engine and no buffer: what an update asks of it."""

    def __init__(self, url: str, *, world_size: int = 1) -> None:
        self._member = Member(
            name="engine-0", url=url, incarnation=0, world_size=world_size, state="joining", version=-1, heartbeat=0.0
        )
        self.version = -1

    def state(self) -> RunState:
        """As the buffer would tell it."""
        return RunState(
            request=0,
            phase="running",
            error=None,
            epoch=1,
            version=self.version,
            step=0,
            members=(self._member,),
            held=0,
            capacity=0,
            issued=0,
            counters=Counters(),
        )

    def commit(self, version: int, members: Sequence[MemberId], lost: Sequence[MemberId]) -> None:
        """Raises RuntimeError if the engine was lost."""
        if lost:
            raise RuntimeError("the engine was lost during an update")
        self.version = version


class Trainer:
    """Megatron-Core's parameters in bfloat16 on one process."""

    def __init__(self, path: Path) -> None:
        import torch.distributed as dist

        from moe_asyncrl.checkpoint.hf_load import load_hf
        from moe_asyncrl.checkpoint.megatron_names import global_parameters
        from moe_asyncrl.config.capability import Capabilities
        from moe_asyncrl.train.model import build_model
        from moe_asyncrl.train.parallel import ParallelRuntime

        torch.set_num_threads(1)
        self.layout = Layout()
        self._runtime = ParallelRuntime(Capabilities(), rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
        self._runtime.setup(self.layout)
        self.spec = ModelSpec.from_hf(path)
        self.chunks = build_model(self.spec, self.layout, Capabilities(), dtype=torch.bfloat16)
        load_hf(self.chunks, self.spec, self.layout, path)
        found = global_parameters(self.chunks, self.spec, self.layout, 0)
        self.parameters = {name: value.detach() for name, value in found.items()}

    def put(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over `weights`, by Megatron-Core's names. Raises KeyError if they are not this model's."""
        if set(weights) != set(self.parameters):
            raise KeyError("the weights that were kept are not those of this model")
        for name, value in weights.items():
            self.parameters[name].copy_(value)

    def hf_tensors(self) -> dict[str, torch.Tensor]:
        """All weights under their HF names, as copies."""
        from moe_asyncrl.weights.gather import iter_hf_tensors

        found: dict[str, torch.Tensor] = {}
        for bucket in iter_hf_tensors(
            self.parameters, self.spec, self.layout, 0, dtype=torch.bfloat16, max_bytes=1 << 26, timeout_s=60
        ):
            found |= {name: value for name, value in bucket.items() if value is not None}
        return found

    def publisher(self, control: OneEngine, key: str, weights: Weights, events: Any = None) -> Any:
        """The publisher that a run would have. `close` it."""
        from moe_asyncrl.train.publish import Publisher

        return Publisher(
            self.chunks,
            self.spec,
            self.layout,
            0,
            weights=weights,
            engine=Engine(count=1, dtype="bfloat16"),
            connect=lambda member: EngineClient.of(member, self.spec, key),
            control=control,
            events=events,
        )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runtime.close()
