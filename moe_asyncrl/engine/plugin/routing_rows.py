"""Routing rows inside the scheduler: the weights that made each are recorded with it, and sampling's rows are kept.

SGLang keeps the experts of each token beside its KV slot, and reads them there when a request ends. So the answer says
nothing of the weights that wrote a slot (a prefix of the cache may be an older policy's), and after a retraction it has
the experts of the second reading. Here

- each forward pass stamps the slots that it writes with the version of the weights;
- before a request with sampled tokens is thrown out, its rows are copied;
- when it ends, these stand in the answer, which says version and source of each row, and leaves the scheduler in the
  smallest type and without dense layers (`moe_asyncrl/replay/encoding.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_asyncrl.engine.plugin.hooks import Hook, register_hooks
from moe_asyncrl.replay.encoding import CACHED, PREFILLED, SAMPLED, encode_rows

HOOKS: tuple[Hook, ...] = (
    (
        "sglang.srt.model_executor.model_runner.ModelRunner.init_routed_experts_capturer",
        "after",
        "routing_rows:find_layers",
    ),
    ("sglang.srt.state_capturer.base.BaseTopkCapturer.on_forward_end", "after", "routing_rows:stamp_pass"),
    ("sglang.srt.state_capturer.base.TopkCaptureOutput.finalize", "after", "routing_rows:stamp_late"),
    ("sglang.srt.managers.schedule_batch.release_req", "before", "routing_rows:keep_rows"),
    (
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
        "_maybe_collect_routed_experts",
        "after",
        "routing_rows:answer",
    ),
)
CAPTURER = "routed_experts"
"""SGLang has capturers of other things, too."""


@dataclasses.dataclass
class Kept:
    """Rows [0, n) of a request that was thrown out after it had sampled."""

    experts: npt.NDArray[np.int32]
    """[n, all layers, K]"""
    version: npt.NDArray[np.int32]
    source: npt.NDArray[np.int8]


def register_routing() -> None:
    """Register every hook with SGLang, once per process."""
    register_hooks(HOOKS, "which records what the routing rows are of")


def find_layers(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Note which decoder layers route, beside the rows."""
    capturer = _capturer()
    if capturer is None or runner.is_draft_worker:
        return
    found = {
        int(m.layer_id)
        for m in runner.model.modules()
        if type(m).__name__ in ("TopK", "HashTopK") and getattr(m, "layer_id", None) is not None
    }
    capturer.host_cache.moe_layers = np.array(sorted(found) or range(capturer.num_layers), dtype=np.uint16)


def stamp_pass(result: Any, capturer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    """After a forward pass: its slots hold rows of the weights that are loaded now."""
    if capturer.host_cache.name != CAPTURER:
        return
    if result is not None:  # the copy to the host ends later, and by then other weights may be loaded
        result.weight_version = _loaded_version()
        return
    slots = getattr(forward_batch, "out_cache_loc_virtual", None)
    slots = forward_batch.out_cache_loc if slots is None else slots
    _versions(capturer.host_cache)[slots.cpu().numpy()] = _loaded_version()


def stamp_late(result: Any, output: Any, *args: Any, **kwargs: Any) -> None:
    """The same where the copy runs beside the next pass."""
    if hasattr(output, "weight_version"):
        _versions(output.host_cache)[output.out_cache_loc.cpu().numpy()] = output.weight_version


def keep_rows(*args: Any, **kwargs: Any) -> None:
    """Before a running request gives up its slots: copy the rows of the tokens that it has read."""
    req, pool, capturer = kwargs["req"], kwargs["req_to_token_pool"], _capturer()
    if capturer is None or not req.return_routed_experts or not req.output_ids:
        return  # without a sampled token the second reading is the one that samples the first
    read = min(len(req.origin_input_ids) + len(req.output_ids) - 1, int(req.kv.kv_committed_len))
    req.moe_kept = _rows(capturer, pool, req, 0, read)


def answer(result: Any, processor: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """A request ends: its rows, with what they are of, as bytes."""
    import torch

    capturer, rows = _capturer(), req.routed_experts
    if capturer is None or rows is None or rows.dtype != torch.int32:
        return
    start = int(req.routed_experts_start_len)
    found = _rows(capturer, processor.req_to_token_pool, req, start, start + rows.shape[0])
    layers = capturer.host_cache.moe_layers
    data = encode_rows(start, layers, found.experts[:, layers], found.version, found.source)
    req.routed_experts = torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _rows(capturer: Any, pool: Any, req: Any, start: int, end: int) -> Kept:
    """Rows [start, end) of a request: as kept where they were, else as its slots have them now."""
    slots = pool.req_to_token[req.kv.req_pool_idx][start:end].cpu().numpy()
    experts = capturer.host_cache.buffer.numpy()[slots]
    version = _versions(capturer.host_cache)[slots]
    at, prompt = np.arange(start, end), len(req.origin_input_ids)
    source = np.where(at < prompt, PREFILLED, SAMPLED).astype(np.int8)
    # The last token of a prompt is always read, since that pass samples the first new one.
    source[at < min(int(req.cached_tokens), prompt - 1)] = CACHED
    kept: Kept | None = getattr(req, "moe_kept", None)
    if kept is not None:
        n = max(0, min(len(kept.version), end) - start)
        experts[:n] = kept.experts[start : start + n]
        version[:n] = kept.version[start : start + n]
        source[:n] = kept.source[start : start + n]
    return Kept(experts, version, source)


def _versions(host_cache: Any) -> npt.NDArray[np.int32]:
    """int32 for each slot: the version that wrote it, -1 where none of ours did."""
    found = getattr(host_cache, "moe_versions", None)
    if found is None:
        found = host_cache.moe_versions = np.full(host_cache.num_tokens, -1, dtype=np.int32)
    return found


def _loaded_version() -> int:
    from sglang.srt.runtime_context import get_serving

    try:
        return int(get_serving().weight_version)
    except (TypeError, ValueError):
        return -1


def _capturer() -> Any:
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    return get_global_experts_capturer()
