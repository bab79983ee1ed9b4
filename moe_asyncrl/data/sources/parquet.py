"""A Parquet file as a source.

Parquet is read in row groups, and a shuffled order jumps between them. So the file is turned once into an Arrow file in
the temporary folder (TMPDIR), a thousand rows at a time, and that one is memory-mapped: any row at once, and no memory
that the system cannot take back. The Arrow file has no name from the start on, so that nothing is left behind.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_asyncrl.data.errors import UserError, first_line
from moe_asyncrl.data.prompt import Fields
from moe_asyncrl.data.sources.table import TableRows, check_columns

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = 1024
"""Rows in memory at once."""


def open_parquet(path: Path, fields: Fields, limit: int | None = None) -> TableRows:
    """The file's rows, or its first `limit`. Columns of bytes (pictures, sound) are left out.

    Raises UserError: not a Parquet file, a damaged one, one without rows or without the columns, no room for the copy.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            if file.metadata.num_rows == 0:
                raise UserError(f"{path}: holds no row")
            columns = check_columns(file.schema_arrow, str(path), fields)
            mapped = _copied(file, columns, limit)
    except OSError as e:
        what = f"cannot be copied to {tempfile.gettempdir()}" if _is_full(e) else "cannot be read as Parquet"
        raise UserError(f"{path}: {what}: {e.strerror or first_line(e)}") from None
    except pa.ArrowException as e:
        raise UserError(f"{path}: cannot be read as Parquet: {first_line(e)}") from None
    reader = pa.ipc.open_file(mapped)
    return TableRows([reader.get_batch(i) for i in range(reader.num_record_batches)], str(path), fields, mapped)


def _copied(file: Any, columns: list[str], limit: int | None) -> pa.MemoryMappedFile:
    import pyarrow as pa

    with tempfile.TemporaryFile(prefix="moe-asyncrl-", suffix=".arrow") as copy:
        writer, written = None, 0
        for batch in file.iter_batches(batch_size=ROWS, columns=columns, use_threads=False):
            batch = _without_dictionaries(batch if limit is None else batch.slice(0, limit - written))
            writer = writer or pa.ipc.new_file(copy, batch.schema)
            writer.write_batch(batch)
            written += batch.num_rows
            if limit is not None and written >= limit:
                break
        if writer is not None:
            writer.close()
        copy.flush()
        return pa.memory_map(f"/proc/self/fd/{copy.fileno()}")


def _without_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with categories as their values: an Arrow file cannot change a dictionary from batch to batch."""
    import pyarrow as pa

    fields = [f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in batch.schema]
    columns = [c.cast(f.type) for c, f in zip(batch.columns, fields, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _is_full(error: OSError) -> bool:
    import errno

    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_parquet(path: Path) -> bool:
    """By its name, or by its first bytes. Raises OSError."""
    if path.suffix == ".parquet":
        return True
    with path.open("rb") as f:
        return os.pread(f.fileno(), 4, 0) == b"PAR1"
