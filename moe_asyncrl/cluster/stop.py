"""`moe-asyncrl stop RUN`: the trainer finishes its step, writes a checkpoint, and the run ends. Here or in Slurm."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from moe_asyncrl.cluster.slurm.call import slurm
from moe_asyncrl.cluster.slurm.files import read_job
from moe_asyncrl.cluster.status import Standing, open_folder, standing
from moe_asyncrl.cluster.supervisor import ROLE_STOP_S, TRAINER_STOP_S
from moe_asyncrl.data.errors import DeadlineExceeded, UserError
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.summary import Summary

LOOK_S = 1.0
END_S = TRAINER_STOP_S + 4 * ROLE_STOP_S
"""Longest end of a run that was asked to stop."""


def stop_run(run: str, *, now: bool, say: Callable[[str], None]) -> Summary | None:
    """Ask the run to end and wait for it. `now` ends it at once, without a checkpoint.

    Returns its summary; None for a job that had not begun. Raises `UserError` if it is not running, or cannot be
    reached from here, and `DeadlineExceeded` if it does not end.
    """
    folder = open_folder(run)
    before = standing(folder)
    if before.silent:
        raise UserError(before.silent)
    if not before.alive:
        if before.alive is None and before.owner is not None:
            raise UserError(f"{folder.path}: its supervisor runs on {before.owner.host}; stop it there")
        raise UserError(f"{folder.path}: the run is not running; see moe-asyncrl status")
    if before.jobs is not None:
        if all(job.pending for job in before.jobs):
            return _withdraw(folder, before, say)
        _signal_job(folder, now)
    else:
        assert before.owner is not None
        for number in _signals(now):
            os.kill(before.owner.pid, number)
    say("asked to stop at once" if now else "asked to stop: the trainer finishes its step and writes a checkpoint")
    return _wait(folder)


def _signals(now: bool) -> tuple[signal.Signals, ...]:
    """Two different ones for `now`: two of a kind may arrive as one."""
    return (signal.SIGTERM, signal.SIGINT) if now else (signal.SIGTERM,)


def _signal_job(folder: RunFolder, now: bool) -> None:
    job = read_job(folder)
    assert job is not None
    for number in _signals(now):
        word = number.name.removeprefix("SIG")
        # To the job's own process alone: it stops the roles in their order.
        slurm(["scancel", "--batch", f"--signal={word}", job.job], deadline_s=job.command_timeout_s)


def _withdraw(folder: RunFolder, before: Standing, say: Callable[[str], None]) -> Summary | None:
    job = read_job(folder)
    assert job is not None
    slurm(["scancel", job.job], deadline_s=job.command_timeout_s)
    say(f"job {job.job} was waiting and is cancelled")
    if before.owner is None:
        folder.write_json(folder.summary, Summary(status="stopped", error="cancelled before it began"))
    return None


def _wait(folder: RunFolder) -> Summary | None:
    end = time.monotonic() + END_S
    while True:
        after = standing(folder)
        if after.alive is False or (after.owner is not None and after.owner.ended is not None):
            return after.summary
        if time.monotonic() > end:
            raise DeadlineExceeded(f"{folder.path}: the run did not end within {END_S:g} s; try --now")
        time.sleep(LOOK_S)
