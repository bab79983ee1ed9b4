"""From a path to the source behind it: a file, a folder or glob of files, or a data set's folder."""

from __future__ import annotations

import glob
from collections.abc import Callable
from pathlib import Path

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompt import Fields, Prompt
from moe_asyncrl.data.prompts import PromptFile
from moe_asyncrl.data.sources.dataset_folder import dataset_files, is_dataset_folder, one_dataset, open_dataset
from moe_asyncrl.data.sources.parquet import is_parquet, open_parquet
from moe_asyncrl.data.sources.rows import Chain, Rows

MAX_FILES = 512
"""Files of one source; each is kept open."""
SUFFIXES = (".jsonl", ".parquet")

Check = Callable[[Prompt], None]


def open_path(
    path: Path, fields: Fields, *, split: str | None = None, limit: int | None = None, check: Check | None = None
) -> Rows:
    """The rows behind a path. JSON lines are checked whole (up to `limit`), tables by their columns.

    Raises UserError with the file, and the row where there is one: see `files_at`, `PromptFile.open`, `open_parquet`
    and `open_dataset`.
    """
    if is_dataset_folder(path):
        return open_dataset(one_dataset(path, split), fields)
    parts: list[Rows] = []
    try:
        for file in files_at(path, split):
            left = None if limit is None else limit - sum(len(p) for p in parts)
            if left is not None and left <= 0:
                break
            parts.append(_open_file(file, fields, left, check))
    except BaseException:
        for part in parts:
            part.close()
        raise
    return parts[0] if len(parts) == 1 else Chain(parts)


def read_whole(rows: Rows) -> bool:
    """True for JSON lines: every one was read and checked when they were opened."""
    return all(isinstance(part, PromptFile) for part in (rows.parts if isinstance(rows, Chain) else (rows,)))


def files_at(path: Path, split: str | None = None) -> list[Path]:
    """The files that a path means, sorted by name; a split keeps those whose names begin with it.

    Raises UserError: nothing there, JSON lines and Parquet side by side (which may be the same data twice), too many.
    """
    if is_dataset_folder(path):
        return dataset_files(one_dataset(path, split))
    if set(str(path)) & set("*?[") and not path.exists():
        files = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        if not files:
            raise UserError(f"{path}: no file fits this pattern")
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and not _hidden(p.relative_to(path)))
        if not files:
            raise UserError(f"{path}: no {' or '.join(SUFFIXES)} file in this folder, and it is no saved data set")
    elif split is not None:
        raise UserError(f"{path}: a split is one of a folder; leave out split {split!r}")
    else:
        return [path]
    if split is not None:
        names = sorted({p.name for p in files})
        files = [p for p in files if p.stem == split or p.name.startswith((f"{split}-", f"{split}.", f"{split}_"))]
        if not files:
            raise UserError(f"{path}: no file begins with split {split!r}; there are: {', '.join(names[:8])}")
    if len({p.suffix == ".parquet" for p in files}) > 1:
        raise UserError(f"{path}: holds Parquet and other files side by side; name one kind, such as {path}/*.parquet")
    if len(files) > MAX_FILES:
        raise UserError(f"{path}: {len(files)} files, at most {MAX_FILES} for one source; make larger ones of them")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _open_file(path: Path, fields: Fields, limit: int | None, check: Check | None) -> Rows:
    try:
        parquet = is_parquet(path)
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    if parquet:
        return open_parquet(path, fields, limit)
    return PromptFile.open(path, limit=limit, check=check, fields=fields)
