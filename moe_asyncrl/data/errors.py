"""Errors that a user reads: one line that says what is wrong, where, and what to do."""

from __future__ import annotations


class UserError(Exception):
    """Bad input or a broken surrounding. The command line prints it as one line and exits non-zero."""


class DeadlineExceeded(UserError):
    """A bounded wait ran out. The message names what was waited for, and whom."""


class EngineLost(Exception):
    """An engine died or stopped answering while it held a request. The caller may resubmit elsewhere."""


class StaleEpoch(Exception):
    """The sender's lease is older than the newest one: another copy of the trainer owns the run now."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
