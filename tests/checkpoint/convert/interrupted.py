"""Conversions that are killed, and how they go on."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.checkpoint.convert.support import contents

LIMIT_S = 60.0


@contextlib.contextmanager
def started(*arguments: str, rest: float = 0.0, largest_file: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A conversion in small units as a process of its own, since it is to be killed. Nothing of it is left."""

    def limit() -> None:
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    command = [sys.executable, "-m", "tests.checkpoint.convert.small_units", str(rest), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit, start_new_session=True
    )
    try:
        yield process
    finally:
        family = children(process)
        process.kill()
        process.communicate(timeout=LIMIT_S)
        assert not psutil.wait_procs(family, timeout=10)[1], "workers outlived their parent"


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The workers."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def done_units(out: Path) -> int:
    """Lines of the journal of an unfinished conversion."""
    journal = out.parent / f".{out.name}.partial" / ".convert" / "journal.jsonl"
    try:
        return len(journal.read_bytes().splitlines())
    except FileNotFoundError:
        return 0


def until(what: Callable[[], bool]) -> None:
    """Wait for something that is soon so."""
    end = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)


def killed_at_random(what: str, source: Path, out: Path, expected: dict[str, bytes], times: int, seed: int) -> int:
    """Kill a conversion `times` times, each after a random number of units, then let it end, and look at what it wrote.

    Returns how many times something was there to go on from.
    """
    chance, resumed = random.Random(seed), 0
    for _ in range(times):
        with started(what, str(source), str(out), "--workers", "2", rest=0.03) as process:
            before = done_units(out)
            more = before + chance.randrange(3)
            until(lambda more=more, process=process: done_units(out) > more or process.poll() is not None)  # type: ignore[misc]
            time.sleep(chance.random() * 0.04)
            workers = children(process)
            victim = chance.choice([process.pid, *(w.pid for w in workers)])
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            process.communicate(timeout=LIMIT_S)
        if out.exists():
            break
        resumed += done_units(out) > 0
    if not out.exists():
        with started(what, str(source), str(out), "--workers", "2") as process:
            _, said = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, said
    assert contents(out) == expected
    assert not (out.parent / f".{out.name}.partial").exists()
    return resumed
