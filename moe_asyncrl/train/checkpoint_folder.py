"""Which checkpoints there are, and which of them are whole. Nothing here knows what is in them.

A checkpoint is a folder `step-00000012` whose `trainer.json` is written last and atomically, and lists the size of
every other file. A folder without it, or with a file that is missing or short, is not a checkpoint: a save was
interrupted. Older checkpoints go only when the newer one is on the disk for good, so that at every moment one of them
can be read.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.messages import Counters, Cursor
from moe_asyncrl.telemetry.run_folder import sync, write_atomic

SCHEMA = 1
SIDE_FILE = "trainer.json"
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer must know to go on, beside weights and moments."""

    schema: int = SCHEMA
    step: int
    """Reinforcement-learning steps done (supervised ones where that is the objective)."""
    version: int
    """Policy version of the weights: published again, under this number, before anything is trained."""
    adam_steps: int
    """Updates that Adam's moments have seen; its bias correction goes on from there."""
    cursor: Cursor
    counters: Counters
    seed: int
    recipe_digest: str
    """Of the parts of the recipe that a resume may not change."""
    layout: str
    """Of the trainer that wrote it, for people; any layout can read it."""
    model: str
    """Digest of the model's shape."""
    files: dict[str, int] = {}
    """Size in bytes of every other file, by name within the folder."""


def folder_of(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return checkpoints / f"step-{step:08d}"


def seal(folder: Path, info: CheckpointInfo) -> None:
    """Make a folder whose other files are all written a checkpoint, which no crash of the machine undoes."""
    found = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != SIDE_FILE and not path.name.endswith(".tmp")
    ]
    for path in found:
        sync(path)
    sync(folder)
    files = {str(path.relative_to(folder)): path.stat().st_size for path in found}
    write_atomic(
        folder / SIDE_FILE, msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(info, files=files)))
    )
    sync(folder)
    sync(folder.parent)


def read_info(folder: Path) -> CheckpointInfo:
    """Read the side file. Raises `UserError` that says why the folder is not a complete checkpoint."""
    side = folder / SIDE_FILE
    try:
        info = msgspec.json.decode(side.read_bytes(), type=CheckpointInfo)
    except OSError as e:
        raise UserError(f"{folder}: not a complete checkpoint: {SIDE_FILE} cannot be read ({e.strerror})") from None
    except msgspec.MsgspecError as e:
        raise UserError(f"{side}: damaged ({e})") from None
    if info.schema != SCHEMA:
        raise UserError(f"{side}: schema {info.schema}, this build reads {SCHEMA}")
    for name, size in info.files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} of {size} bytes"
            raise UserError(f"{folder}: not a complete checkpoint: {name} {what}")
    return info


def numbered(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything that looks like a checkpoint, complete or not, in rising order."""
    if not checkpoints.is_dir():
        return []
    found = [(int(m[1]), p) for p in checkpoints.iterdir() if p.is_dir() and (m := _NAME.fullmatch(p.name))]
    return sorted(found)


def newest_complete(checkpoints: Path) -> tuple[Path, CheckpointInfo] | None:
    """The complete checkpoint of the highest step; None if there is none."""
    for _, folder in reversed(numbered(checkpoints)):
        try:
            return folder, read_info(folder)
        except UserError:
            continue
    return None


def make_room(checkpoints: Path, step: int) -> Path:
    """An empty folder for the checkpoint of `step`; what an interrupted save left there goes."""
    folder = folder_of(checkpoints, step)
    remove(folder)
    folder.mkdir(parents=True)
    return folder


def complete_steps(checkpoints: Path) -> list[int]:
    """Steps of the complete checkpoints, rising."""
    found = []
    for step, folder in numbered(checkpoints):
        try:
            read_info(folder)
        except UserError:
            continue
        found.append(step)
    return found


def expired(checkpoints: Path, keep: int, keep_every: int = 0) -> list[Path]:
    """Complete checkpoints but for the `keep` newest, and interrupted saves older than the newest of those.

    With `keep_every` above 0, those of its multiples stay too. What is newer than the newest complete one may be
    under way and is left alone.
    """
    complete = complete_steps(checkpoints)
    if not complete:
        return []
    kept = set(complete[-keep:]) | {step for step in complete if keep_every > 0 and step % keep_every == 0}
    return [folder for step, folder in numbered(checkpoints) if step not in kept and step < complete[-1]]


def void(folder: Path) -> None:
    """Make a folder no checkpoint any more, before it is removed: half removed, it must not look complete."""
    (folder / SIDE_FILE).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint, if it is there."""
    if folder.exists():
        void(folder)
        shutil.rmtree(folder)
