"""The JSONL prompt source: one object a line with `prompt` or `messages`, `answer`, and any metadata.

The whole file is read once and checked at the start; after that only the byte offset of each line stays in memory,
and a line is parsed again when it is asked for. Which prompt an index means is a pure function of (index, seed,
number of lines), so workers need no shared state and a resumed run goes on with the same order.
"""

from __future__ import annotations

import array
import pathlib
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompt import Fields, Prompt, prompt_from

__all__ = ["Prompt", "PromptFile", "PromptOrder", "parse_line", "permutation"]

_BOM = b"\xef\xbb\xbf"
PLAIN = Fields()
"""`prompt` or `messages`, and `answer`."""


def parse_line(line: bytes, source: str, fields: Fields = PLAIN) -> Prompt:
    """The prompt on one line. Raises UserError that starts with `source`."""
    try:
        record = msgspec.json.decode(line.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise UserError(f"{source}: not UTF-8 (byte {e.start + 1} of the line is 0x{line[e.start]:02x})") from None
    except msgspec.DecodeError as e:
        raise UserError(f"{source}: not valid JSON: {e}") from None
    if not isinstance(record, dict):
        raise UserError(f"{source}: expected a JSON object, found {type(record).__name__}")
    return prompt_from(record, source, fields)


class PromptFile:
    """A checked JSONL file. Positions count its prompts from 0 in file order; blank lines are not prompts."""

    def __init__(
        self,
        path: pathlib.Path,
        offsets: npt.NDArray[np.int64],
        lines: npt.NDArray[np.int64],
        fields: Fields = PLAIN,
    ) -> None:
        self.path = path
        self._fields = fields
        self._offsets = offsets
        self._lines = lines
        self._file = path.open("rb")

    @classmethod
    def open(
        cls,
        path: str | pathlib.Path,
        *,
        limit: int | None = None,
        check: Callable[[Prompt], None] | None = None,
        fields: Fields = PLAIN,
    ) -> PromptFile:
        """Read and check the file: every line parses and `check` (which raises UserError) accepts it.

        `limit` keeps the first prompts only; the rest is not read. Raises UserError with the file and, where there is
        one, the line.
        """
        path = pathlib.Path(path)
        offsets, lines = array.array("q"), array.array("q")
        try:
            for offset, number, line in _scan(path):
                if limit is not None and len(offsets) == limit:
                    break
                prompt = parse_line(line, f"{path}:{number}", fields)
                if check is not None:
                    check(prompt)
                offsets.append(offset)
                lines.append(number)
        except OSError as e:
            raise UserError(f"{path}: cannot be read: {e.strerror}") from None
        if not offsets:
            raise UserError(f"{path}: holds no prompt; expected one JSON object a line with `prompt` or `messages`")
        return cls(path, np.frombuffer(offsets, dtype=np.int64), np.frombuffer(lines, dtype=np.int64), fields)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, position: int) -> Prompt:
        """The prompt at a position. Raises UserError if the file changed since it was checked, IndexError outside."""
        self._file.seek(int(self._offsets[position]))
        return parse_line(self._file.readline().strip(), f"{self.path}:{self._lines[position]}", self._fields)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in range(len(self)))

    def close(self) -> None:
        self._file.close()


def _scan(path: pathlib.Path) -> Iterator[tuple[int, int, bytes]]:
    """(byte offset, line number from 1, stripped line) of every line that is not blank."""
    with path.open("rb") as f:
        offset = 0
        for number, line in enumerate(f, start=1):
            start = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
            content = line[start:].strip()
            if content:
                yield offset + start, number, content
            offset += len(line)


class PromptOrder:
    """Which prompt the instance `index` is: index -> (epoch, position), the same in every process.

    Each epoch is a permutation of the n positions, made from (seed, epoch) by ordering the raw 64-bit words of
    numpy's Philox generator (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011). The raw words are
    part of the generator's definition and do not change with numpy's version.
    """

    def __init__(self, n: int, *, seed: int, shuffle: bool) -> None:
        if n < 1:
            raise ValueError(f"an order needs at least one prompt, got {n}")
        self._n, self._seed, self._shuffle = n, seed, shuffle
        self._recent: dict[int, npt.NDArray[np.int64]] = {}

    def at(self, index: int) -> tuple[int, int]:
        """(epoch, position in the file) of prompt instance `index` >= 0."""
        if index < 0:
            raise IndexError(f"prompt instance {index}")
        epoch, place = divmod(index, self._n)
        return epoch, int(self._permutation(epoch)[place]) if self._shuffle else place

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._recent:
            while len(self._recent) >= 2:  # returned tickets reach back over the last boundary, never further
                del self._recent[min(self._recent)]
            self._recent[epoch] = permutation(self._n, seed=self._seed, epoch=epoch)
        return self._recent[epoch]


def permutation(n: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """int64 [n]: the order of one epoch."""
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)
