"""Who supervises a run: one small file in its folder, so that others find the supervisor and a second one is noticed.

    claim ─▶ show, show, … ─▶ release            as long as the file has this supervisor's token
                 └──▶ lost: another one has put its token there

A cluster can start a job a second time while its first copy still runs on a node that it lost sight of. Both see the
run folder, so the newest claim wins: the older supervisor ends its roles without touching what the run has written.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.run_folder import RunFolder, write_atomic

LOOK_S = 2.0
"""Seconds between two looks at who owns the run."""
GRACE_S = 10.0
"""Seconds that an older supervisor gets to see that it is not wanted any more."""


class RoleLook(msgspec.Struct, frozen=True, kw_only=True):
    """One role as its supervisor sees it."""

    name: str
    node: str = ""
    state: str = "running"
    """`running`, `ended`, or what went wrong in one line."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `supervisor.json`."""

    schema: int = 1
    token: str
    """Made anew by each supervisor."""
    host: str
    pid: int
    began: int
    """When that process began, in the kernel's ticks since the machine started: a pid is used again one day."""
    job: str | None = None
    """Slurm's number of the job; none for a run on one machine."""
    ended: float | None = None
    """When the supervisor ended the run, Unix seconds; none while it is at work, or if it was killed."""
    roles: tuple[RoleLook, ...] = ()

    def alive(self) -> bool | None:
        """Whether that process lives; None if it is on another machine, where nobody here can see it."""
        if self.ended is not None:
            return False
        if self.host != socket.gethostname():
            return None
        return began(self.pid) == self.began


def began(pid: int) -> int | None:
    """When a living process began, in ticks since the machine started; None if there is none.

    Not in seconds of the clock: those are reckoned from the boot, and come out differently when the clock is set.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def read_owner(folder: RunFolder) -> Owner | None:
    """The owner as last written; None if nobody ever was."""
    try:
        return msgspec.json.decode(folder.supervisor_json.read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return None


class Ownership:
    """This process's claim on a run. Made by `claim`."""

    def __init__(self, folder: RunFolder, owner: Owner) -> None:
        self._folder = folder
        self._owner = owner
        self._next_look = 0.0
        self._lost = False

    @classmethod
    def claim(
        cls,
        folder: RunFolder,
        *,
        job: str | None = None,
        say: Callable[[str], None] = lambda line: None,
        grace_s: float = GRACE_S,
    ) -> Ownership:
        """Take the run. A job takes it from an older copy, which gets `grace_s` seconds to see that and end.

        Raises `UserError` if a supervisor on this machine is at work on it, unless a job claims it.
        """
        before = read_owner(folder)
        alive = before is not None and before.alive()
        if before is not None and alive is True and job is None:
            raise UserError(f"{folder.path}: its supervisor is alive (pid {before.pid}); end it with: moe-asyncrl stop")
        owner = Owner(
            token=secrets.token_hex(16),
            host=socket.gethostname(),
            pid=os.getpid(),
            began=began(os.getpid()) or 0,
            job=job,
        )
        claimed = cls(folder, owner)
        claimed._write()
        if before is not None and alive is not False:
            where = f"pid {before.pid} on {before.host}"
            say(f"an older supervisor ({where}) may be alive: waiting {grace_s:g} s for its end")
            time.sleep(grace_s)
        return claimed

    def lost(self, *, look_now: bool = False) -> bool:
        """True once another supervisor has claimed the run. Looks at most every two seconds, or now."""
        now = time.monotonic()
        if not self._lost and (look_now or now >= self._next_look):
            self._next_look = now + LOOK_S
            self._lost = not self._mine()
        return self._lost

    def show(self, roles: Sequence[RoleLook]) -> None:
        """Write how the roles are, if that is news and the run is still ours."""
        if self._owner.roles != tuple(roles) and self._mine():
            self._owner = msgspec.structs.replace(self._owner, roles=tuple(roles))
            self._write()

    def release(self) -> None:
        """The run has ended."""
        if self._mine():
            self._owner = msgspec.structs.replace(self._owner, ended=time.time())
            self._write()

    def _mine(self) -> bool:
        now = read_owner(self._folder)
        return now is not None and now.token == self._owner.token

    def _write(self) -> None:
        write_atomic(self._folder.supervisor_json, msgspec.json.format(msgspec.json.encode(self._owner), indent=2))
