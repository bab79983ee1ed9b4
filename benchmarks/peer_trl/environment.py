"""The peer's own virtual environment, `.venv-trl`: made on first use, from a lock, with the torch that ours uses.

python -m benchmarks.peer_trl.environment [--torch-index INDEX]
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

from moe_asyncrl.data.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "trl.txt"
FOLDER = ROOT / ".venv-trl"
COMMAND_S = 900.0
"""Longest time for one call of pip."""


def fingerprint(lock: str) -> str:
    """Tells one lock from another."""
    return hashlib.sha256(lock.encode()).hexdigest()


def torch_pin(lock: str) -> str:
    """The lock's line for torch. Raises `UserError` if it has none."""
    for line in lock.splitlines():
        if line.startswith("torch=="):
            return line.strip()
    raise UserError(f"{LOCK.name} does not name torch: run `make lock`")


def ensure_environment(*, folder: Path = FOLDER, lock: Path = LOCK, torch_index: str = "") -> Path:
    """The interpreter of the peer's environment, which is made first if missing, unfinished, or from another lock.

    `torch_index` is where torch is taken from; pip's own index if empty.
    Raises `UserError`, in one line, if it cannot be made.
    """
    try:
        wanted = lock.read_text()
    except OSError as error:
        raise UserError(f"{lock}: {error.strerror}; it comes with the project, or from `make lock`") from None
    stamp, python = folder / ".stamp", folder / "bin" / "python"
    if python.exists() and stamp.exists() and stamp.read_text() == fingerprint(wanted):
        return python
    print(f"making {folder.name} for the peer (1.2 GB; a minute or more)", file=sys.stderr, flush=True)
    _run(folder, [sys.executable, "-m", "venv", "--clear", str(folder)], "making it")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", "--no-input"]
    if torch_index:
        _run(folder, [*pip, "--no-deps", "--index-url", torch_index, torch_pin(wanted)], "installing torch")
    _run(folder, [*pip, "-r", str(lock)], f"installing {lock.name}")
    stamp.write_text(fingerprint(wanted))
    return python


def _run(folder: Path, command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"the peer's environment {folder.name}: {what}: {error}") from None
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        raise UserError(f"the peer's environment {folder.name}: {what} failed: {errors[-1].strip()}")


def main() -> int:
    """`make setup-trl`."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--torch-index", default="", help="an index to take torch from, and nothing else")
    try:
        print(ensure_environment(torch_index=options.parse_args().torch_index))
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
