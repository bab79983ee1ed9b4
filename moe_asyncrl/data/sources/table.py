"""Rows of an Arrow table on disk, seen through memory-mapped record batches: one row becomes Python when asked for."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompt import Fields, Prompt, prompt_from

if TYPE_CHECKING:
    import pyarrow as pa


class TableRows:
    """Prompts from record batches."""

    def __init__(self, batches: Sequence[pa.RecordBatch], label: str, fields: Fields, keep_open: Any = None) -> None:
        """`label` begins the names of rows; `keep_open` is closed with this. Columns were checked before."""
        self._batches = [b for b in batches if b.num_rows]
        self._label, self._fields, self._keep_open = label, fields, keep_open
        self._ends = np.cumsum([b.num_rows for b in self._batches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, position: int) -> Prompt:
        if not 0 <= position < len(self):
            raise IndexError(f"{self._label}[{position}] of {len(self)}")
        at = int(np.searchsorted(self._ends, position, side="right"))
        batch = self._batches[at]
        row = batch.slice(position - (int(self._ends[at]) - batch.num_rows), 1).to_pylist()[0]
        return prompt_from(plain(row), f"{self._label}[{position}]", self._fields)

    def close(self) -> None:
        self._batches, self._ends = [], self._ends[:0]
        if self._keep_open is not None:
            self._keep_open.close()


def plain(value: Any) -> Any:
    """A row as JSON values: times and decimals become text, and messages lose the keys that they do not have."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [
            {k: v for k, v in plain(item).items() if v is not None} if isinstance(item, Mapping) else plain(item)
            for item in value
        ]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    return value


def check_columns(schema: pa.Schema, label: str, fields: Fields) -> list[str]:
    """The columns that can be read as JSON values, in order.

    Raises UserError, with the names of the columns that there are, where prompt, messages or a named answer is none.
    """
    there = ", ".join(schema.names) or "none"
    for setting, name in fields.required.items():
        if not _reaches(schema, name):
            raise UserError(f"{label}: no column {name!r} ({setting}); it has: {there}")
    prompt, messages, _ = fields.places
    if not fields.required.keys() & {"prompt_field", "messages_field"} and not {prompt, messages} & set(schema.names):
        raise UserError(
            f"{label}: no column `prompt` or `messages`; name one with prompt_field or messages_field; it has: {there}"
        )
    return [f.name for f in schema if not _holds_bytes(f.type)]


def _reaches(schema: pa.Schema, name: str) -> bool:
    import pyarrow as pa

    if name in schema.names:
        return True
    root, *inside = name.split(".")
    if root not in schema.names:
        return False
    kind = schema.field(root).type
    for part in inside:
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return False
        kind = kind.field(part).type
    return True


def _holds_bytes(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))
