"""A worker process of a conversion: units come as JSON lines on its input, answers go out on its output."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
from collections.abc import Callable

import msgspec

from moe_asyncrl.checkpoint.convert.mover import write_unit
from moe_asyncrl.checkpoint.convert.program import (
    Answer,
    CompareUnit,
    Difference,
    Failed,
    Finished,
    Moved,
    Unit,
    WriteUnit,
)
from moe_asyncrl.checkpoint.convert.stores import Stores
from moe_asyncrl.data.errors import UserError

TOLD_AFTER = 16 << 20
"""Bytes between two words on the progress."""
_DIE_WITH_PARENT = 1


def main() -> None:
    """Serve until the input ends. The parent's death is the end of this process."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return
    decoder: msgspec.json.Decoder[Unit] = msgspec.json.Decoder(Unit)
    stores = Stores()
    for line in sys.stdin.buffer:
        _tell(_carried_out(decoder.decode(line), stores))


def _carried_out(unit: Unit, stores: Stores) -> Answer:
    waiting = 0

    def moved(size: int) -> None:
        nonlocal waiting
        waiting += size
        if waiting >= TOLD_AFTER:
            _tell(Moved(waiting))
            waiting = 0

    try:
        if isinstance(unit, WriteUnit):
            write_unit(unit, moved, stores)
            answer: Answer = Finished(unit.number)
        else:
            answer = Finished(unit.number, _compared(unit, moved, stores))
    except UserError as error:
        return Failed(str(error))
    except OSError as error:
        return Failed(
            f"{error.filename or getattr(unit, 'target', 'reading')}: {error.strerror}", error.errno or errno.EIO
        )
    except MemoryError:
        return Failed("out of memory", errno.ENOMEM)
    if waiting:
        _tell(Moved(waiting))
    return answer


def _compared(unit: CompareUnit, moved: Callable[[int], None], stores: Stores) -> tuple[Difference, ...]:
    from moe_asyncrl.checkpoint.convert.difference import compare_unit

    return compare_unit(unit, moved, stores)


def _tell(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
