"""The limit and the floor of an update: bytes from one process to another over gloo, with nothing around them.

    raw     a broadcast of each bucket in place, several in flight: what the wire can do
    floor   pack, hash, broadcast, hash, copy, bucket after bucket: what no update with digests can leave out

Both move the same bytes in the same buckets, from the process that holds the trainer's parameters to one that holds
parameters of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
import xxhash

Way = Literal["raw", "floor", "end"]
WAYS: tuple[Way, ...] = ("raw", "floor", "end")
TIMEOUT = timedelta(seconds=120)
_c10d: Any = dist


def buckets_of(sizes: Sequence[int], bucket_bytes: int) -> list[list[tuple[int, int, int]]]:
    """Tensors of `sizes` bytes, in order and cut where a bucket of `bucket_bytes` is full: (tensor, from, to) each."""
    buckets: list[list[tuple[int, int, int]]] = [[]]
    room = bucket_bytes
    for number, size in enumerate(sizes):
        at = 0
        while at < size:
            if room == 0:
                buckets.append([])
                room = bucket_bytes
            taken = min(room, size - at)
            buckets[-1].append((number, at, at + taken))
            at, room = at + taken, room - taken
    return buckets


class Pair:
    """The sender's side. The receiver is a process that it starts; `close` ends that."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, bucket_bytes: int, depth: int) -> None:
        """`tensors`: contiguous, of the trainer. `depth`: broadcasts in flight, for `raw`."""
        self._sources = [tensor.detach().view(torch.uint8).view(-1) for tensor in tensors]
        sizes = [len(source) for source in self._sources]
        self._plan, self._depth = buckets_of(sizes, bucket_bytes), depth
        self.bytes = sum(sizes)
        store = _c10d.TCPStore("127.0.0.1", 0, 2, True, TIMEOUT, wait_for_workers=False)
        self._other = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sync.floor", str(store.port), str(bucket_bytes), str(depth)],
            stdin=subprocess.PIPE,
            text=True,
        )
        assert self._other.stdin is not None
        self._other.stdin.write(" ".join(str(size) for size in sizes) + "\n")
        self._other.stdin.flush()
        self._group = _group(store, 0)
        self._slots = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(depth)]

    def measure(self, way: Literal["raw", "floor"]) -> float:
        """Seconds from the first byte that is touched to the receiver's word that it has everything."""
        self._tell(way)
        began = time.perf_counter()
        if way == "raw":
            _raw(self._group, self._plan, self._slots, self._depth)
        else:
            for number, bucket in enumerate(self._plan):
                slot = self._slots[number % len(self._slots)]
                at = 0
                for tensor, low, high in bucket:
                    slot[at : at + high - low].copy_(self._sources[tensor][low:high])
                    at += high - low
                xxhash.xxh3_128_digest(slot[:at].numpy().data)
                _broadcast(self._group, slot[:at]).wait()
        _broadcast(self._group, torch.zeros(1), root=1).wait()
        return time.perf_counter() - began

    def _tell(self, way: Way) -> None:
        # By the pipe first: in a collective the receiver would run out of time while other ways are measured.
        assert self._other.stdin is not None
        self._other.stdin.write("\n")
        self._other.stdin.flush()
        _broadcast(self._group, torch.tensor([WAYS.index(way)])).wait()

    def close(self) -> None:
        """End the receiver."""
        self._tell("end")
        self._group = None
        self._other.wait(30)


def _group(store: Any, rank: int) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return _c10d.ProcessGroupGloo(_c10d.PrefixStore("floor/", store), rank, 2, options)


def _broadcast(group: Any, tensor: torch.Tensor, root: int = 0) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
    return group.broadcast([tensor], options)


def _raw(group: Any, plan: list[list[tuple[int, int, int]]], slots: list[torch.Tensor], depth: int) -> None:
    """Either side: the bytes lie in `slots` and stay there."""
    flying: deque[Any] = deque()
    for number, bucket in enumerate(plan):
        if len(flying) == depth:
            flying.popleft().wait()
        flying.append(_broadcast(group, slots[number % depth][: sum(high - low for _, low, high in bucket)]))
    for work in flying:
        work.wait()


def receive() -> None:
    """The receiving process."""
    options = argparse.ArgumentParser()
    for name in ("port", "bucket_bytes", "depth"):
        options.add_argument(name, type=int)
    args = options.parse_args()
    torch.set_num_threads(1)
    sizes = [int(word) for word in sys.stdin.readline().split()]
    targets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    plan = buckets_of(sizes, args.bucket_bytes)
    slots = [torch.empty(args.bucket_bytes, dtype=torch.uint8) for _ in range(args.depth)]
    group = _group(_c10d.TCPStore("127.0.0.1", args.port, 2, False, TIMEOUT), 1)
    order = torch.zeros(1, dtype=torch.int64)
    while True:
        sys.stdin.readline()
        _broadcast(group, order).wait()
        way = WAYS[int(order)]
        if way == "end":
            return
        if way == "raw":
            _raw(group, plan, slots, args.depth)
        else:
            for number, bucket in enumerate(plan):
                slot, at = slots[number % len(slots)], 0
                size = sum(high - low for _, low, high in bucket)
                _broadcast(group, slot[:size]).wait()
                xxhash.xxh3_128_digest(slot[:size].numpy().data)
                for tensor, low, high in bucket:
                    targets[tensor][low:high].copy_(slot[at : at + high - low])
                    at += high - low
        _broadcast(group, torch.zeros(1), root=1).wait()


if __name__ == "__main__":
    receive()
