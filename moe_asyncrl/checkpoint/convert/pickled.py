"""Pickles of other programs, read and written as plain values: nothing that a pickle names is imported or run.

torch keeps metadata and small objects as pickles. Reading one gives `Built` for every object in it, whatever class it
names. Writing knows the few kinds of values that are needed, in protocol 2 (opcodes: `pickletools` of Python).
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251  torch's file format; what it names is never looked up
import struct
from dataclasses import dataclass
from itertools import chain
from typing import Any


@dataclass(frozen=True, slots=True)
class Global:
    """Something that a pickle names: a class, a function, a type."""

    module: str
    name: str


class Built:
    """An object: `function` called with `arguments`, or a class instantiated with them; then given a state."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], state: Any = None, *, is_instance: bool = False):
        self.function, self.arguments, self.state, self.is_instance = function, arguments, state, is_instance

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        """A field of the state. Raises KeyError."""
        return self.state[name]


@dataclass(frozen=True, slots=True)
class Persistent:
    """A value that lies outside of the pickle, and the key under which the pickle refers to it."""

    key: Any


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        def new(cls: Any, *arguments: Any) -> Built:
            return Built(cls, arguments)

        return type(name, (), {"module": module, "name": name, "__new__": new})

    def persistent_load(self, key: Any) -> Persistent:
        return Persistent(key)


def load(data: bytes) -> Any:
    """The value of a pickle; what it names is a class with `module` and `name`. Raises ValueError if it is damaged."""
    try:
        return _Reader(io.BytesIO(data)).load()
    except Exception as error:  # the unpickler raises whatever the bytes lead it to
        raise ValueError(f"damaged pickle: {error}") from error


def dump(value: Any) -> bytes:
    """The pickle of a value. Raises TypeError for a kind of value that is not known here."""
    writer = _Writer()
    writer.write(value)
    return b"\x80\x02" + b"".join(writer.out) + b"."


class _Writer:
    """Names and strings are written once and referred to afterwards; everything else is written where it stands."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self._memo: dict[tuple[str, str], int] = {}

    def write(self, value: Any) -> None:
        kind = type(value)  # the commonest first
        if kind is int:
            self._integer(value)
        elif kind is Built:
            self.write(value.function)
            self.write(value.arguments)
            self.out.append(b"\x81" if value.is_instance else b"R")
            if value.state is not None:
                self.write(value.state)
                self.out.append(b"b")
        elif kind is Global:
            self._once((value.module, value.name))
        elif kind is str:
            self._once(("", value))
        elif kind is tuple:
            self._sequence(b"(", value, b"t")
        elif kind is list:
            self._sequence(b"](", value, b"e")
        elif kind is dict:
            self._sequence(b"}(", chain.from_iterable(value.items()), b"u")
        elif kind is Persistent:
            self.write(value.key)
            self.out.append(b"Q")
        elif kind is float:
            self.out.append(b"G" + struct.pack(">d", value))
        elif value is None:
            self.out.append(b"N")
        elif kind is bool:
            self.out.append(b"\x88" if value else b"\x89")
        else:
            raise TypeError(f"no way to pickle {kind.__name__}")

    def _sequence(self, begin: bytes, values: Any, end: bytes) -> None:
        self.out.append(begin)
        for value in values:
            self.write(value)
        self.out.append(end)

    def _integer(self, value: int) -> None:
        if 0 <= value < 256:
            self.out.append(b"K" + bytes([value]))
        elif -(1 << 31) <= value < 1 << 31:
            self.out.append(b"J" + struct.pack("<i", value))
        else:
            encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out.append(b"\x8a" + bytes([len(encoded)]) + encoded)

    def _once(self, key: tuple[str, str]) -> None:
        """A string (without a module), or what a module has by a name."""
        number = self._memo.get(key)
        if number is not None:
            self.out.append(b"j" + struct.pack("<I", number))
            return
        module, name = key
        number = self._memo[key] = len(self._memo)
        encoded = name.encode()
        begin = f"c{module}\n".encode() if module else b"X" + struct.pack("<I", len(encoded))
        self.out.append(begin + encoded + (b"\n" if module else b"") + b"r" + struct.pack("<I", number))
