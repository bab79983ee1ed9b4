"""A command under a pseudo-terminal, and the terminal itself: enough of one to see what a person sees."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")


class Screen:
    """Lines as a terminal of `columns` shows them; those that scrolled away stay above."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.lines = [""]
        self.cursor_shown = True
        self._row = self._column = 0
        self._rest = ""

    def feed(self, text: str) -> None:
        """Take output. A control sequence may be cut anywhere."""
        text = self._rest + text
        at = 0
        while at < len(text):
            c = text[at]
            if c == "\x1b":
                match = CONTROL.match(text, at)
                if match is None:
                    break  # the rest of it is still to come
                self._control(match.group(1), match.group(2))
                at = match.end()
                continue
            self._character(c)
            at += 1
        self._rest = text[at:]

    def _character(self, c: str) -> None:
        if c == "\r":
            self._column = 0
        elif c == "\n":
            self._row += 1
            if self._row == len(self.lines):
                self.lines.append("")
        elif c >= " ":
            if self._column == self.columns:
                self._column = 0
                self._character("\n")
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + c + line[self._column + 1 :]
            self._column += 1

    def _control(self, argument: str, what: str) -> None:
        if what == "A":
            top = max(0, len(self.lines) - self.rows)
            self._row = max(top, self._row - int(argument or 1))
        elif what == "K":
            assert argument == "2", argument
            self.lines[self._row] = ""
        elif what in "hl" and argument == "?25":
            self.cursor_shown = what == "h"
        else:
            assert what == "m", (argument, what)

    def visible(self) -> list[str]:
        """The lines in the window."""
        return [line.rstrip() for line in self.lines[-self.rows :]]

    def all(self) -> list[str]:
        """Also what has scrolled away."""
        return [line.rstrip() for line in self.lines]


class Terminal:
    """A command that runs in a terminal of a size. Use it as a context: it is killed at the end."""

    def __init__(
        self, command: list[str], *, cwd: Path, columns: int = 80, rows: int = 24, term: str = "xterm-256color"
    ) -> None:
        self.screen = Screen(columns, rows)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._end, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            env={**environment, "TERM": term, "PYTHONPATH": ""},
        )
        os.close(other)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
        os.close(self._end)

    def read(self, wait_s: float = 0.2) -> bool:
        """Take what was written within `wait_s` seconds. False once the command has closed the terminal."""
        ready, _, _ = select.select([self._end], [], [], wait_s)
        if not ready:
            return True
        try:
            block = os.read(self._end, 1 << 16)
        except OSError:  # that is how a pseudo-terminal says that nobody is at the other end
            return False
        self.screen.feed(self._decoder.decode(block))
        return bool(block)

    def until(self, what: str, true: Callable[[Screen], object], limit_s: float) -> None:
        """Until the screen is so. Fails when the command ends first, or after `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while not true(self.screen):
            going = self.read()
            assert going, f"it ended before {what}\n" + "\n".join(self.screen.all())
            assert time.monotonic() < end, f"not {what} within {limit_s:g} s\n" + "\n".join(self.screen.all())

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, limit_s: float) -> int:
        """Until it ends: its exit code."""
        end = time.monotonic() + limit_s
        while self.read():
            assert time.monotonic() < end, f"no end within {limit_s:g} s\n" + "\n".join(self.screen.all())
        return self.process.wait(30)
