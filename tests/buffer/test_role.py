"""The buffer as a process of its own: fresh ones, as signals, files and leases over a restart are the point."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from moe_asyncrl.buffer.client import BufferClient
from moe_asyncrl.buffer.role import limits_of
from moe_asyncrl.config.recipe import Buffer, Data, Model, Recipe, Rollout
from moe_asyncrl.data import messages as m
from moe_asyncrl.data.errors import StaleEpoch
from moe_asyncrl.telemetry.run_folder import RunFolder

RECIPE = Recipe(model=Model(path="m"), data=Data(train="t"), rollout=Rollout(groups_per_step=2))
PROGRAM = """
import sys, msgspec, asyncio
from moe_asyncrl.buffer import role
from moe_asyncrl.buffer.service import Timing
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.telemetry.run_folder import RunFolder
recipe = msgspec.json.decode(sys.argv[2], type=Recipe)
sys.exit(asyncio.run(role._run(RunFolder(sys.argv[1]), recipe, Timing(), quiet_s=float(sys.argv[3]))))
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


class Process:
    def __init__(self, folder: RunFolder, recipe: Recipe = RECIPE, quiet_s: float = 60.0) -> None:
        command = [sys.executable, "-c", PROGRAM, str(folder.path), msgspec.json.encode(recipe).decode(), str(quiet_s)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def end(self, number: int | None = None) -> int:
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(20)
        if self.process.stderr is not None:
            self.error = self.process.stderr.read()
            self.process.stderr.close()
        return code


@pytest.fixture
def start() -> Iterator[type[Process]]:
    made: list[Process] = []

    class Kept(Process):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            made.append(self)

    yield Kept
    for p in made:
        if p.process.poll() is None:
            p.process.kill()
            p.end()


def test_it_serves_until_sigterm_and_leases_rise_over_restarts(folder: RunFolder, start: type[Process]) -> None:
    first = start(folder)
    with BufferClient.connect(folder, sender="trainer-0", deadline_s=20) as t:
        assert t.acquire_lease() == 1
        t.begin(3, m.Cursor(watermark=6), m.Counters())
        t.commit(3, [], [])
        assert t.state().phase == "running"
        kept = msgspec.json.decode(folder.control_json.read_bytes())
        assert (kept["epoch"], kept["version"], kept["step"], kept["phase"]) == (1, 3, 3, "running")
        assert stat.S_IMODE(os.stat(folder.keys / "client.json").st_mode) == 0o600
        assert first.end(signal.SIGTERM) == 0
        assert not (folder.endpoints / "buffer.json").exists()

        second = start(folder)
        with BufferClient.connect(folder, sender="trainer-0", deadline_s=20) as later:
            assert later.acquire_lease() == 2
            with pytest.raises(StaleEpoch, match="lease 2"):
                t.take(4, 3, 2, deadline_s=20)
            second.process.kill()
            second.end()

    third = start(folder)
    with BufferClient.connect(folder, sender="trainer-0", deadline_s=20) as last:
        assert last.acquire_lease() == 3
    assert third.end(signal.SIGINT) == 0


def test_it_ends_by_itself_when_the_run_is_over_and_nobody_asks_any_more(
    folder: RunFolder, start: type[Process]
) -> None:
    buffer = start(folder, quiet_s=0.5)
    with BufferClient.connect(folder, sender="trainer-0", deadline_s=20) as t:
        t.acquire_lease()
        time.sleep(1.0)
        assert t.state().phase == "starting", "a quiet run is not over"
        t.set_phase("finished")
    assert buffer.end() == 0


def test_an_address_that_cannot_be_had_is_one_clear_line(folder: RunFolder, start: type[Process]) -> None:
    recipe = msgspec.structs.replace(RECIPE, buffer=Buffer(host="203.0.113.7"))
    buffer = start(folder, recipe)
    assert buffer.end() != 0
    assert "UserError: the buffer cannot listen on tcp://203.0.113.7:*" in buffer.error


def test_the_recipe_sets_the_bounds() -> None:
    limits = limits_of(RECIPE)
    assert (limits.groups_per_step, limits.max_staleness, limits.capacity) == (2, 2, 6)
    narrow = msgspec.structs.replace(RECIPE, buffer=Buffer(capacity_groups=4, max_staleness=5, max_attempts=1))
    assert (limits_of(narrow).capacity, limits_of(narrow).max_attempts) == (4, 1)
