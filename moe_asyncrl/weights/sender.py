"""Hands gathered buckets to the update: one under way while the next is gathered, never more."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from moe_asyncrl.data.protocols import TensorMeta
from moe_asyncrl.weights.buckets import Bucket
from moe_asyncrl.weights.failure import EnginesFailed
from moe_asyncrl.weights.gather import HfBucket
from moe_asyncrl.weights.loop_thread import LoopThread
from moe_asyncrl.weights.update import Updater


class BucketSender:
    """For the thread that gathers, on the first rank. A failure of engines is kept until `drain` raises it."""

    def __init__(self, loop: LoopThread, updater: Updater) -> None:
        self._loop = loop
        self._updater = updater
        self._under_way: Future[None] | None = None
        self._failure: EnginesFailed | None = None

    def put(self, planned: Bucket, gathered: HfBucket, version: int | None) -> bool:
        """Send a bucket once the one before has arrived. False: engines failed, and there is nothing more to send.

        Raises ValueError if what was gathered is not what was planned.
        """
        if gathered.flat is None:
            raise ValueError("only the rank that collects can send")
        label = str(gathered.dtype).removeprefix("torch.")
        found = tuple(TensorMeta(name=t.name, dtype=label, shape=t.shape) for t in gathered.tensors)
        if found != planned.tensors:
            raise ValueError(f"the bucket that was gathered is not the planned one ({planned.names})")
        if not self._settle():
            return False
        self._under_way = self._loop.submit(self._updater.send(planned, gathered.flat.view(torch.uint8), version))
        return True

    def drain(self) -> None:
        """Wait for the last bucket. Raises EnginesFailed if engines failed in this one or before."""
        if not self._settle() and self._failure is not None:
            raise self._failure

    def forget(self) -> None:
        """Be ready for another attempt."""
        self._settle()
        self._failure = None

    def _settle(self) -> bool:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            try:
                under_way.result()
            except EnginesFailed as failure:
                self._failure = failure
        return self._failure is None
