"""The server process: honest failures at the start, and nothing left behind at any end."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from moe_asyncrl.data.errors import DeadlineExceeded, UserError
from moe_asyncrl.engine.command import EngineArgs
from moe_asyncrl.engine.ports import free_port
from moe_asyncrl.engine.server import EngineDied, Server, last_error
from tests.engines.fixtures import EngineHouse, TestEngine

PARENT = """
import pathlib, sys, time
from moe_asyncrl.engine.command import EngineArgs
from moe_asyncrl.engine.ports import free_port
from moe_asyncrl.engine.server import Server
args = EngineArgs(model=sys.argv[1], port=free_port(), python=sys.executable, max_total_tokens=4096)
server = Server.start(args, cpu=True, log_path=pathlib.Path(sys.argv[2]))
print(server.pid, flush=True)
server.wait_ready(240)
print("ready", flush=True)
time.sleep(600)
"""


def group_members(group: int) -> list[int]:
    """Living processes of a process group; those only waiting to be reaped are gone."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


def wait_until_gone(group: int, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while group_members(group):
        assert time.monotonic() < end, f"still alive after {seconds} s: {group_members(group)}"
        time.sleep(0.1)


def test_a_killed_parent_leaves_no_process(engines: EngineHouse, tmp_path: pathlib.Path) -> None:
    """A process of its own, because it is killed with SIGKILL."""
    model, _ = engines.model("qwen3_moe")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model), str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    try:
        assert parent.stdout.readline() == "ready\n"
        names = {psutil.Process(pid).name() for pid in group_members(group)}
        assert len(names) >= 3, f"guard, server and scheduler at least, found {names}"
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        wait_until_gone(group)
        log = (tmp_path / "log").read_text(errors="replace")
        assert "Traceback" not in log
    finally:
        parent.kill()
        for pid in group_members(group):
            os.kill(pid, signal.SIGKILL)


def test_a_server_that_dies_at_start_says_why(tmp_path: pathlib.Path) -> None:
    """A model that only SGLang itself can refuse."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "no_such_family", "architectures": ["NoSuchModel"]}))
    args = EngineArgs(model=str(model), port=free_port(), python=sys.executable)
    log = tmp_path / "log"
    log.write_text("ValueError: of an earlier run\n")
    with Server.start(args, cpu=True, log_path=log, name="engine-7") as server:
        with pytest.raises(EngineDied) as raised:
            server.wait_ready(240)
        message = str(raised.value)
        assert message.startswith("engine-7: the SGLang server ended (exit status ")
        assert "no_such_family" in message and "\n" not in message and str(log) in message
        assert raised.value.tail
    wait_until_gone(server.pid)


def test_an_interpreter_without_sglang_says_so(tmp_path: pathlib.Path, engines: EngineHouse) -> None:
    model, _ = engines.model("qwen3_moe")
    bare = tmp_path / "python"
    # Without site-packages, as an environment in which SGLang was forgotten.
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    args = EngineArgs(model=str(model), port=free_port(), python=str(bare))
    server = Server.start(args, cpu=True, log_path=tmp_path / "log")
    with server, pytest.raises(EngineDied, match=r"ModuleNotFoundError|ImportError"):
        server.wait_ready(60)


def test_a_missing_interpreter_says_so(tmp_path: pathlib.Path, engines: EngineHouse) -> None:
    model, _ = engines.model("qwen3_moe")
    args = EngineArgs(model=str(model), port=free_port(), python="/nowhere/python")
    server = Server.start(args, cpu=True, log_path=tmp_path / "log")
    with server, pytest.raises(EngineDied, match=r"FileNotFoundError.*/nowhere/python"):
        server.wait_ready(60)


def test_a_missing_model_is_found_before_the_start(tmp_path: pathlib.Path) -> None:
    args = EngineArgs(model=str(tmp_path), port=free_port(), python=sys.executable)
    with pytest.raises(UserError, match=r"config\.json is missing"):
        Server.start(args, cpu=True, log_path=tmp_path / "log")


def test_a_port_that_is_taken_is_named(tmp_path: pathlib.Path, engines: EngineHouse) -> None:
    model, _ = engines.model("qwen3_moe")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        args = EngineArgs(model=str(model), port=port, python=sys.executable)
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is not free"):
            Server.start(args, cpu=True, log_path=tmp_path / "log")


def test_a_start_that_takes_too_long_names_what_it_waited_for(tmp_path: pathlib.Path, engines: EngineHouse) -> None:
    model, _ = engines.model("qwen3_moe")
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nsleep 600\n")
    slow.chmod(0o755)
    args = EngineArgs(model=str(model), port=free_port(), python=str(slow))
    server = Server.start(args, cpu=True, log_path=tmp_path / "log", name="engine-2")
    with server, pytest.raises(DeadlineExceeded, match=r"engine-2: waited 0\.5 s for the SGLang server at http"):
        server.wait_ready(0.5)
    wait_until_gone(server.pid)
    server.stop()


def test_another_program_on_the_port_is_not_taken_for_the_server(engine: Callable[..., TestEngine]) -> None:
    """It answers, but serves another model."""
    e = engine()
    assert e.server._ask("GET", "/model_info")["model_path"] == e.server.args.model
    assert e.server._ask("GET", "/no_such_page") == {}


def test_a_healthy_log_has_no_traceback(engine: Callable[..., TestEngine]) -> None:
    """Also: no hook of the plugin was logged as failed, and the trainer was not loaded."""
    log = engine().server.log_path.read_text(errors="replace")
    assert "Traceback" not in log and "Megatron" not in log
    assert "Failed to" not in "".join(line for line in log.splitlines(True) if "plugin" in line or "hook" in line)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("fine\nTraceback (most recent call last):\n  File x\nValueError: bad head\nbye\n", "ValueError: bad head"),
        ("[2026-01-01] Scheduler hit an exception: x\ntorch.OutOfMemoryError: no\n", "torch.OutOfMemoryError: no"),
        ("usage: x\nserve.py: error: unrecognized arguments: --nope\n", "error: unrecognized arguments: --nope"),
        (
            "[2026-01-01 10:25:58] ERROR:    [Errno 98] error while attempting to bind on address\nbye\n",
            "ERROR:    [Errno 98] error while attempting to bind on address",
        ),
        ("all is well\n", ""),
        ("", ""),
    ],
)
def test_last_error(log: str, expected: str) -> None:
    assert last_error(log) == expected
