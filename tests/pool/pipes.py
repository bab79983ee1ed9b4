"""Values on a pipe between a test and its own children, tensors copied.

Python's multiprocessing would hand over tensors as shared memory that ends with the sender.
"""

from __future__ import annotations

import io
from multiprocessing.connection import Connection
from typing import Any

import torch


def send(pipe: Connection, value: Any) -> None:
    """Send any value that can be saved. Raises as `torch.save` does, before anything is sent."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    pipe.send_bytes(buffer.getbuffer())


def receive(pipe: Connection) -> Any:
    """The next value of a pipe. Raises EOFError when the other end is closed."""
    return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
