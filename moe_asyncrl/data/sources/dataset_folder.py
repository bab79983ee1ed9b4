"""A folder that `datasets.save_to_disk` wrote: one data set, or one for each split. Its Arrow files are mapped."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from moe_asyncrl.data.errors import UserError, first_line
from moe_asyncrl.data.prompt import Fields
from moe_asyncrl.data.sources.table import TableRows, check_columns

SPLITS = "dataset_dict.json"
STATE = "state.json"


def is_dataset_folder(path: Path) -> bool:
    """True for what `save_to_disk` writes, with and without splits."""
    return (path / SPLITS).is_file() or (path / STATE).is_file()


def one_dataset(path: Path, split: str | None) -> Path:
    """The folder of the split, or `path` itself if it has none.

    Raises UserError, with the splits that there are: none is named and there are several, or not that one.
    """
    if not (path / SPLITS).is_file():
        if split is not None:
            raise UserError(f"{path}: a data set without splits; leave out split {split!r}")
        return path
    try:
        splits = [str(name) for name in json.loads((path / SPLITS).read_text())["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path / SPLITS}: cannot be read: {first_line(e)}") from None
    if split is None and len(splits) == 1:
        return path / splits[0]
    if split not in splits:
        wrong = "name a split" if split is None else f"no split {split!r}"
        raise UserError(f"{path}: {wrong}; it has: {', '.join(splits) or 'none'}")
    return path / split


def open_dataset(path: Path, fields: Fields) -> TableRows:
    """The data set's rows. Columns of bytes (pictures, sound) are left out.

    Raises UserError: a damaged one, one without rows or without the columns, or `datasets` is not installed.
    """
    try:
        datasets = importlib.import_module("datasets")  # seconds
    except ImportError as e:
        raise UserError(f"{path}: reading it needs the package `datasets`: {first_line(e)}") from None
    try:
        found = datasets.load_from_disk(str(path), keep_in_memory=False)
        table = found.data
        schema = table.schema
    except Exception as e:  # datasets and Arrow raise all kinds for files that are damaged or missing
        raise UserError(f"{path}: cannot be read as a data set: {first_line(e)}") from None
    if len(found) == 0:
        raise UserError(f"{path}: holds no row")
    return TableRows(table.select(check_columns(schema, str(path), fields)).to_batches(), str(path), fields)


def dataset_files(path: Path) -> list[Path]:
    """The Arrow files of the data set, in order."""
    return sorted(path.glob("*.arrow"))
