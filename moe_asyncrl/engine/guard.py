"""Stands between a parent and its engine: `python -I -S guard.py PARENT_PID COMMAND…`. Standard library only.

It leads the engine's process group. When the parent is gone (`kill -9` included) or the engine's main process ends, it
kills what is left of the group. A parent-death signal alone would not do: it fires when the *thread* that started the
child ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
PERIOD_S = 0.25


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(argv: list[str]) -> int:
    """Run the command until it or the parent ends; exit with the command's status (128 + n for signal n)."""
    parent = int(argv[0])
    child = subprocess.Popen(argv[1:], stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    # To the engine's main process only: were its helpers told too, it would take their end for a crash.
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    while os.getppid() == parent:
        try:
            status = child.wait(timeout=PERIOD_S)
            break
        except subprocess.TimeoutExpired:
            continue
    else:
        status = -signal.SIGKILL
    _kill_rest_of_group()
    return status if status >= 0 else 128 - status


def _kill_rest_of_group() -> None:
    # Each member by itself: one killpg would kill this process before it can report the engine's status.
    group, own = os.getpgrp(), os.getpid()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != own:
            try:
                if os.getpgid(int(entry)) == group:
                    os.kill(int(entry), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
