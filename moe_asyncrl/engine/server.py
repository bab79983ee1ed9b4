"""One SGLang server process: start it, watch it, stop it with everything that it started."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from moe_asyncrl.data.errors import DeadlineExceeded, UserError
from moe_asyncrl.engine.command import EngineArgs, build_command, child_environment
from moe_asyncrl.engine.ports import check_port, free_port

GUARD = pathlib.Path(__file__).with_name("guard.py")
POLL_S = 0.2
TAIL_LINES = 15
_ERROR_LINE = re.compile(r"(?:^|[\s\]])((?:[A-Za-z_][\w.]*)?(?:Error|Exception|ERROR|error)\b: ?.*)$")


class EngineDied(UserError):
    """The server process ended by itself. The message has its own last error; `tail` its last log lines."""

    def __init__(self, message: str, tail: str) -> None:
        super().__init__(message)
        self.tail = tail


def last_error(log: str) -> str:
    """The last line of a log that states an error ("" if none): a traceback's last line, or an argument parser's."""
    for line in reversed(log.splitlines()):
        if found := _ERROR_LINE.search(line):
            return found.group(1).strip()
    return ""


class Server:
    """A running server. Made by `start`; use `wait_ready` before the first request and `stop` at the end."""

    def __init__(
        self, args: EngineArgs, name: str, process: subprocess.Popen[bytes], log_path: pathlib.Path, log_start: int
    ) -> None:
        self.args = args
        self.name = name
        self.log_path = log_path
        self._process = process
        self._log_start = log_start

    @classmethod
    def start(
        cls,
        args: EngineArgs,
        *,
        cpu: bool,
        log_path: pathlib.Path,
        name: str = "engine-0",
        environ: Mapping[str, str] | None = None,
    ) -> Server:
        """Start the process and return at once. Its output goes to `log_path` (appended). Port 0 takes a free one.

        Raises UserError when the model directory or the port cannot be used.
        """
        if not (pathlib.Path(args.model) / "config.json").is_file():
            raise UserError(f"{name}: no model at {args.model} (config.json is missing)")
        if args.port == 0:
            args = msgspec.structs.replace(args, port=free_port(args.host))
        check_port(args.host, args.port)
        command = build_command(args, cpu=cpu)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid())]
        with log_path.open("ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                [*guard, *command.argv],
                env=child_environment(os.environ if environ is None else environ, command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(args, name, process, log_path, log_start)

    @property
    def url(self) -> str:
        return f"http://{self.args.host}:{self.args.port}"

    @property
    def pid(self) -> int:
        """Of the guard, which leads the process group."""
        return self._process.pid

    def exit_status(self) -> int | None:
        """None while the server runs."""
        return self._process.poll()

    def check_alive(self) -> None:
        """Raises EngineDied if the process has ended."""
        status = self.exit_status()
        if status is None:
            return
        log = self.log_path.read_bytes()[self._log_start :].decode(errors="replace")
        tail = "\n".join(log.splitlines()[-TAIL_LINES:])
        ended = f"killed by signal {status - 128}" if status > 128 else f"exit status {status}"
        reason = last_error(log) or "no error in its log"
        raise EngineDied(f"{self.name}: the SGLang server ended ({ended}): {reason}; see {self.log_path}", tail)

    def wait_ready(self, deadline_s: float = 300.0) -> None:
        """Returns when the server answers. Raises EngineDied, or DeadlineExceeded after `deadline_s` seconds."""
        end = time.monotonic() + deadline_s
        while True:
            self.check_alive()
            if self._ask("GET", "/model_info").get("model_path") == self.args.model:
                # SGLang does this itself after its warm-up, which we skip; it keeps the collector off what never dies.
                self._ask("POST", "/freeze_gc")
                return
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"{self.name}: waited {deadline_s:g} s for the SGLang server at {self.url} to answer; "
                    f"see {self.log_path}"
                )
            time.sleep(POLL_S)

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        """The JSON object that the port answers; empty if it does not, or if another program answers."""
        headers = {"Authorization": f"Bearer {self.args.api_key}"} if self.args.api_key else {}
        connection = http.client.HTTPConnection(self.args.host, self.args.port, timeout=10)
        try:
            connection.request(method, path, headers=headers)
            reply = connection.getresponse()
            found = json.loads(reply.read())
            return found if reply.status == 200 and isinstance(found, dict) else {}
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            connection.close()

    def stop(self, grace_s: float = 5.0) -> None:
        """End the server and its whole process group: SIGTERM, then SIGKILL after `grace_s` seconds. Idempotent."""
        if self._process.poll() is None:
            # The guard hands it to the server's main process.
            self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait(grace_s)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
