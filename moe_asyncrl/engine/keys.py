"""The key that every request to a run's engines must carry."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

KEY_FILE = "engine.key"


def ensure_engine_key(folder: Path) -> str:
    """The key of the run, made by the first engine role that asks. File mode 0600, folder mode 0700."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / KEY_FILE
    if not path.exists():
        # Not the pid: engines on two nodes can have the same one.
        made = folder / f".{KEY_FILE}.{secrets.token_hex(6)}"
        with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as f:
            f.write(secrets.token_hex(32))
        # A link appears whole or not at all, and fails if another role was first.
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
        made.unlink()
    return path.read_text(encoding="ascii").strip()
