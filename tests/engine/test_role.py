"""The engine role as a real process, beside a real buffer process. Each test kills or misstarts servers of its own."""

from __future__ import annotations

import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_asyncrl.buffer.client import BufferClient
from moe_asyncrl.cluster.process import RoleProcess, start_role, stop_roles, wait_all
from moe_asyncrl.config.load import dump_recipe
from moe_asyncrl.config.recipe import Data, Engine, Model, Recipe
from moe_asyncrl.data.messages import Counters, Cursor, Member
from moe_asyncrl.telemetry.run_folder import RunFolder
from tests.engines.models import make_model

START_S = 150.0
Start = Callable[..., RoleProcess]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF directory."""
    return make_model("qwen3_moe", tmp_path_factory.mktemp("role") / "model")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """An empty run folder."""
    return RunFolder(tmp_path / "run")


@pytest.fixture
def start(folder: RunFolder, model: Path) -> Iterator[Start]:
    """`start(role, **engine settings)` starts a role of the run; all are stopped at the end."""
    roles: list[RoleProcess] = []

    def go(role: str, **engine: Any) -> RoleProcess:
        settings = {"dtype": "float32", "max_running_requests": 8, "max_total_tokens": 4096, **engine}
        recipe = Recipe(model=Model(path=str(model)), data=Data(train="prompts.jsonl"), engine=Engine(**settings))
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.recipe.write_text(dump_recipe(recipe))
        roles.append(start_role(folder, role, 0 if role == "engine" else None))
        return roles[-1]

    yield go
    stop_roles(roles, grace_s=10.0)


def wait_for_life(client: BufferClient, incarnation: int) -> Member:
    """The engine in the run's state, once it is in that life."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        for member in client.state().members:
            if member.incarnation == incarnation:
                return member
        time.sleep(0.2)
    raise AssertionError(f"no life {incarnation} within {START_S} s")


def family(role: RoleProcess) -> list[psutil.Process]:
    return psutil.Process(role.process.pid).children(recursive=True)


def gone(processes: list[psutil.Process], wait_s: float = 10.0) -> bool:
    return not psutil.wait_procs(processes, timeout=wait_s)[1]


def test_lives_of_an_engine(folder: RunFolder, start: Start) -> None:
    """Joins; starts anew when it is quarantined; leaves when its server dies, and fails when it may not start again."""
    start("buffer", restarts=1)
    role = start("engine", restarts=1)
    with BufferClient.connect(folder, sender="trainer-0") as client:
        client.acquire_lease()
        client.begin(0, Cursor(), Counters())
        first = wait_for_life(client, 0)
        assert (first.name, first.state, first.world_size) == ("engine-0", "joining", 1)
        assert (folder.keys / "engine.key").stat().st_mode & 0o777 == 0o600
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(f"{first.url}/flush_cache", method="POST"), timeout=10)
        client.commit(0, [], [first.id])
        second = wait_for_life(client, 1)
        assert second.state == "joining" and second.url != first.url
        client.commit(1, [second.id], [])
        assert client.state().members[0].state == "serving"
        servers = family(role)
        scheduler = next(p for p in servers if "scheduler" in " ".join(p.cmdline()) or "scheduler" in p.name())
        scheduler.kill()
        assert wait_all([role], 60) and role.exit_code == 1
        assert "the SGLang server ended" in role.error() and "started 2 times" in role.error()
        assert client.state().members == () and gone(servers)


def test_a_server_that_dies_at_start_is_not_started_again(folder: RunFolder, start: Start) -> None:
    """Its own last error is the role's."""
    start("buffer")
    role = start("engine", extra_args=("--no-such-argument",), restarts=5)
    assert wait_all([role], 90) and role.exit_code == 1
    assert "unrecognized arguments: --no-such-argument" in role.error()
    assert "started" not in role.error() and not (folder.logs / "engine-0-sglang.log").read_text().count("usage:") > 1


def test_a_taken_port_is_told(folder: RunFolder, start: Start) -> None:
    """Before anything is started."""
    start("buffer")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        role = start("engine", base_port=port)
        assert wait_all([role], 60) and role.exit_code == 1
    assert f"port {port} on 127.0.0.1 is not free" in role.error()


def test_told_to_stop_while_it_starts(folder: RunFolder, start: Start) -> None:
    """A clean end, and no process left."""
    start("buffer")
    role = start("engine")
    end = time.monotonic() + 60
    while time.monotonic() < end and not (folder.logs / "engine-0-sglang.log").exists():
        time.sleep(0.1)
    servers = family(role)
    assert servers
    role.process.send_signal(signal.SIGTERM)
    assert wait_all([role], 30) and role.exit_code == 0, role.error()
    assert gone(servers)
