"""Where the receiver of weights is hooked into SGLang, in its schedulers and in its HTTP process.

Commands travel as the load format of SGLang's own request for an update from a process group: that pair of messages
reaches every rank, and its reply has room for text.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from datetime import timedelta
from typing import Any

import msgspec

from moe_asyncrl.data.weights import ROUTE
from moe_asyncrl.engine.plugin.hooks import Hook, register_hooks
from moe_asyncrl.engine.plugin.weights_engine import SchedulerEngine, error_reason, stamp
from moe_asyncrl.engine.plugin.weights_receiver import Receiver
from moe_asyncrl.weights.group import wait_of

CARRIER = "moe_asyncrl:"

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
HOOKS: tuple[Hook, ...] = (
    (_MANAGER + "update_weights_from_distributed", "around", "weights_hooks:carried"),
    # The same weights by SGLang's own ways: what we say of them has to stay true.
    (_MANAGER + "update_weights_from_disk", "around", "weights_hooks:from_disk"),
    (_MANAGER + "update_weights_from_tensor", "around", "weights_hooks:from_elsewhere"),
    (_MANAGER + "update_weights_from_ipc", "around", "weights_hooks:from_elsewhere"),
    # Somebody may send it to sleep without us.
    (_MANAGER + "release_memory_occupation", "after", "weights_hooks:released"),
    (_MANAGER + "check_weights", "around", "weights_hooks:check_if_there"),
    (_SCHEDULER + "record_weight_version_change", "after", "weights_hooks:version_changed"),
    # Weights of no version would generate.
    (_SCHEDULER + "continue_generation", "around", "weights_hooks:continue_if_sound"),
    (_SCHEDULER + "handle_generate_request", "around", "weights_hooks:answer_if_broken"),
    # Prefixes are shared by the key that the client sends, which says nothing of the weights in the end.
    (_SCHEDULER + "_add_request_to_queue", "before", "weights_hooks:stamp_request"),
    (
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        "after",
        "weights_hooks:add_hold",
    ),
    # An engine that is joining serves nobody else.
    (
        "sglang.srt.model_executor.model_runner_components.weight_updater.init_custom_process_group",
        "around",
        "weights_hooks:join_in_time",
    ),
    # The scheduler's refusal would not reach the client: it gets no reply of the scheduler's.
    (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.continue_generation",
        "around",
        "weights_hooks:ask_before_continuing",
    ),
)


def register_weights() -> None:
    """Register the hooks, in each of SGLang's processes, and the route in the HTTP process. Raises SystemExit."""
    register_hooks(HOOKS, "which weight updates of moe-asyncrl need")
    if multiprocessing.parent_process() is None:
        from sglang.srt.entrypoints.http_server import app

        if not any(getattr(route, "path", "") == ROUTE for route in app.routes):
            app.add_route(ROUTE, answer, methods=["POST"])


# --- schedulers --------------------------------------------------------------------------------------------------


def receiver_of(scheduler: Any) -> Receiver:
    """The scheduler's receiver, made on first use."""
    found = getattr(scheduler, "_moe_asyncrl_receiver", None)
    if found is None:
        found = Receiver(SchedulerEngine(scheduler), _version())
        scheduler._moe_asyncrl_receiver = found
    return found


def _version() -> int:
    """The label of the weights that are loaded; -1 if it is no number."""
    from sglang.srt.runtime_context import get_serving

    label = str(get_serving().weight_version)
    return int(label) if label.removeprefix("-").isdigit() else -1


def carried(original: Any, manager: Any, request: Any) -> Any:
    """One of our commands, or SGLang's own request."""
    if not str(request.load_format).startswith(CARRIER):
        return from_elsewhere(original, manager, request)
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput

    message = receiver_of(manager.scheduler).handle(request.load_format[len(CARRIER) :])
    return UpdateWeightsFromDistributedReqOutput(success=True, message=message)


def _refusal(manager: Any) -> str:
    holding = receiver_of(manager.scheduler).holding
    if "weights" in manager.offload_tags:
        return "the memory of its weights is given back; wake it first"
    return f"update {holding.update} is under way; abandon it first" if holding.order is not None else ""


def from_disk(original: Any, manager: Any, request: Any) -> Any:
    """All weights, by SGLang: the engine is whole again afterwards."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    if why := _refusal(manager):
        return UpdateWeightFromDiskReqOutput(success=False, message=why, num_paused_requests=0)
    receiver = receiver_of(manager.scheduler)
    result = original(manager, request)
    touched = result.success or not result.message.startswith("Failed to get")
    # A flush that is refused makes a failure of weights that were loaded.
    if result.success or result.message.startswith("Weights were updated"):
        receiver.changed_elsewhere(_version())
    elif touched:
        receiver.spoiled_elsewhere(f"loading {request.model_path} failed: {result.message}")
    return result


def from_elsewhere(original: Any, manager: Any, request: Any) -> Any:
    """Some weights, by SGLang."""
    receiver = receiver_of(manager.scheduler)
    if why := _refusal(manager):
        from sglang.srt.managers import io_struct

        kind = getattr(io_struct, type(request).__name__.replace("Input", "Output"))
        return kind(success=False, message=why)
    result = original(manager, request)
    receiver.changed_in_part()
    return result


def released(result: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """What lay there is gone."""
    holding = receiver_of(manager.scheduler).holding
    if "weights" in manager.offload_tags and not holding.asleep:
        holding.fall_asleep()


def check_if_there(original: Any, manager: Any, request: Any) -> Any:
    """Nobody reads memory that was given back."""
    if "weights" in manager.offload_tags:
        from sglang.srt.managers.io_struct import CheckWeightsReqOutput

        return CheckWeightsReqOutput(success=False, message=_refusal(manager))
    return original(manager, request)


def version_changed(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Somebody has named the weights."""
    receiver_of(scheduler).holding.version = _version()


def continue_if_sound(original: Any, scheduler: Any, request: Any) -> Any:
    """Stay paused on weights that are not whole, and without memory."""
    if receiver_of(scheduler).holding.sound and not scheduler.weight_updater.offload_tags:
        return original(scheduler, request)
    return None


def answer_if_broken(original: Any, scheduler: Any, request: Any, **kwargs: Any) -> Any:
    """While it sleeps and weights come, requests wait; when what came is lost, they get an error at once."""
    holding = receiver_of(scheduler).holding
    if not holding.reason or holding.asleep or holding.state in ("receiving", "received"):
        return original(scheduler, request, **kwargs)
    from sglang.srt.managers.io_struct import AbortReq

    reason = error_reason(f"this engine's weights are not whole: {holding.reason}")
    scheduler.send_abort_output(AbortReq(rid=request.rid, finished_reason=reason), request)
    return None


def stamp_request(scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """Before it is queued, for the first time or after it lost its KV."""
    stamp(req, receiver_of(scheduler).holding.changes)


def join_in_time(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wait for other members as long as the group's name says. NCCL connects later, and its limit ends processes."""
    wait_s = wait_of(kwargs.get("group_name"))
    if wait_s is not None and kwargs.get("backend") == "gloo":
        kwargs["timeout"] = timedelta(seconds=wait_s)
    return original(*args, **kwargs)


def add_hold(result: Any, controller: Any, *args: Any, **kwargs: Any) -> Any:
    """For `/server_info`."""
    hold = receiver_of(controller.scheduler).hold()
    result.internal_state["moe_asyncrl_weights"] = msgspec.to_builtins(hold)
    return result


# --- the HTTP process --------------------------------------------------------------------------------------------


async def _ask(tokenizer_manager: Any, text: str) -> dict[str, Any]:
    """Have every scheduler rank do a command."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

    tokenizer_manager.auto_create_handle_loop()
    request = UpdateWeightsFromDistributedReqInput(names=[], dtypes=[], shapes=[], load_format=CARRIER + text)
    call = tokenizer_manager.update_weights_from_distributed_communicator(request)
    # A caller that goes away must not leave its reply to the next one.
    results = await asyncio.shield(asyncio.ensure_future(call))
    reply: dict[str, Any] = msgspec.json.decode(results[0].message)
    if reply["state"] == "broken":
        async with tokenizer_manager.is_pause_cond:
            # Requests wait here while the engine is paused. The scheduler stays paused, and answers them.
            tokenizer_manager.is_pause = False
            tokenizer_manager.is_pause_cond.notify_all()
    elif tokenizer_manager.config_value("weight_version") != str(reply["version"]):
        tokenizer_manager._update_weight_version_if_provided(str(reply["version"]))
    return reply


async def answer(request: Any) -> Any:
    """The route."""
    from fastapi.responses import Response
    from sglang.srt.entrypoints.http_server import _global_state

    text = (await request.body()).decode(errors="replace")
    reply = await _ask(_global_state.tokenizer_manager, text)
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def ask_before_continuing(original: Any, tokenizer_manager: Any, request: Any) -> Any:
    """Refuse where the scheduler would stay paused."""
    hold = (await _ask(tokenizer_manager, '{"do":"hold"}'))["result"]
    if hold["reason"] or hold["released"]:
        from fastapi import HTTPException

        reason = hold["reason"] or f"its memory of {' and '.join(hold['released'])} is given back"
        why = f"this engine cannot go on, its weights are {hold['state']}: {reason}"
        raise HTTPException(status_code=409, detail=why)
    return await original(tokenizer_manager, request)
