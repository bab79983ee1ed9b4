"""SGLang's scheduler as the receiver of weights sees it (0.5.23)."""

from __future__ import annotations

import http
from typing import Any

import torch

from moe_asyncrl.data.weights import Memory
from moe_asyncrl.engine.plugin.weights_places import Params

TAGS: dict[Memory, tuple[str, ...]] = {"weights": ("weights",), "cache": ("kv_cache", "cuda_graph")}
"""SGLang's names of what its memory saver releases."""


class SchedulerEngine:
    """Implements `weights_receiver.Engine`."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.weight_updater
        self._runner = scheduler.tp_worker.model_runner
        self._group = self._manager.tp_cpu_group
        self.rank = int(torch.distributed.get_rank(self._group))
        self.ranks = int(torch.distributed.get_world_size(self._group))
        name = str(self._runner.device)
        self.device = torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)

    @property
    def _updater(self) -> Any:
        return self._runner.weight_updater

    @property
    def _model(self) -> Any:
        return self._updater.get_model()

    def gather(self, value: Any) -> list[Any]:
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def paused(self) -> bool:
        return bool(self._scheduler._engine_paused)

    def unfit(self) -> str:
        from sglang.srt.model_executor.model_runner_components import weight_updater
        from sglang.srt.runtime_context import get_model

        if len(self._manager._select_runners("all")) > 1:
            return "it has a draft model, whose weights this update would not reach"
        if self._manager._session is not None:
            return "a weight update of SGLang's own is open (/begin_weight_update); end it first"
        if "weights" in self.released():
            return "its memory of weights is given back; wake it first"
        if get_model().weight_cache_mode != "off":
            return "its weights lie in SGLang's weight cache, which other engines share (--weight-cache-mode)"
        if any(getattr(p, "format_ue8m0", False) for p in self._model.parameters()):
            return (
                "SGLang has packed its FP8 scales on loading (UE8M0, for DeepGEMM), and would take new ones for packed "
                "ones; start it with --fp8-gemm-backend and --moe-runner-backend triton (engine.extra_args)"
            )
        return str(weight_updater._unsupported_derived_weight_cache_error(self._model) or "")

    def released(self) -> tuple[Memory, ...]:
        return tuple(memory for memory, tags in TAGS.items() if set(tags) & set(self._manager.offload_tags))

    def cannot_sleep(self) -> str:
        if not self.paused():
            return "it has to be paused before it sleeps"
        if self.device.type != "cpu" and not self._manager.memory_saver_adapter.enabled:
            return "it was started without --enable-memory-saver"
        if not self._manager.is_fully_idle(ignore_waiting=True):
            return f"it is not idle: {len(self._scheduler.running_batch.reqs)} requests run"
        # A prefix that outlived its memory would be read from whatever lies there later.
        return "" if self._scheduler.flush_cache() else "its prefix cache cannot be forgotten"

    def release(self) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput())

    def get_back(self, memory: Memory) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        tags = [tag for tag in TAGS[memory] if tag in self._manager.offload_tags]
        self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))

    def params(self) -> Params:
        model = self._model
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def load(self, named: Any) -> object:
        return self._model.load_weights(iter(named))

    def groups(self) -> dict[str, Any]:
        return dict(self._updater._model_update_group)

    def begin(self) -> None:
        self._updater.begin_weight_update()

    def end(self, *, copied: bool) -> None:
        if copied:
            from sglang.srt.model_loader.loader import post_load_weights

            # What was copied is final already.
            post_load_weights(self._model)
        else:
            self._updater.end_weight_update(run_post_load=True)

    def unfit_for_copy(self) -> str:
        """Why its parameters alone are not all of its weights; empty if they are."""
        if getattr(self._model, "quant_config", None) is not None:
            return "its weights are quantised: what it made of them on loading cannot be copied"
        return ""

    def name_version(self, version: int) -> None:
        self._scheduler.record_weight_version_change(new_version=str(version))

    def weights_changed(self, changes: int) -> None:
        for req in self._scheduler.waiting_queue:
            stamp(req, changes)

    def answer_all(self, reason: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput

        # A request that runs would be ended by one more step of the model. Retracted, it waits, and what waits is
        # answered without one.
        self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._scheduler.abort_request(AbortReq(abort_all=True, finished_reason=error_reason(reason)))


def error_reason(reason: str) -> dict[str, Any]:
    """Makes the HTTP reply an error."""
    return {"type": "abort", "status_code": http.HTTPStatus.SERVICE_UNAVAILABLE, "message": reason}


def stamp(req: Any, changes: int) -> None:
    """Give a request that has no KV yet a tree of the prefix cache that only weights after `changes` changes write."""
    if req.kv.holds_kv:
        return
    if not hasattr(req, "_moe_asyncrl_key"):
        req._moe_asyncrl_key = req.extra_key
    req.extra_key = f"{req._moe_asyncrl_key or ''}|weights {changes}"
