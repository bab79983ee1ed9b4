"""What the plugin says of routing rows, where a CPU engine cannot show it: copies beside the next pass, cached slots.

Retractions and updates in flight are tested on a running engine (`test_updates.py`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_asyncrl.engine.plugin import routing_rows
from moe_asyncrl.replay.encoding import decode_rows

SLOTS, LAYERS, K = 32, 3, 2


class Engine:
    """Slots, one request and passes over its tokens; experts say which pass wrote them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = SimpleNamespace(
            name="routed_experts", num_tokens=SLOTS, buffer=torch.zeros(SLOTS, LAYERS, K, dtype=torch.int32)
        )
        self.capturer = SimpleNamespace(host_cache=cache, num_layers=LAYERS)
        cache.moe_layers = np.array([1, 2], dtype=np.uint16)
        self.version, self.passes = 0, 0
        monkeypatch.setattr(routing_rows, "_capturer", lambda: self.capturer)
        monkeypatch.setattr(routing_rows, "_loaded_version", lambda: self.version)
        self.pool = SimpleNamespace(req_to_token=torch.zeros(1, SLOTS, dtype=torch.int64))
        self.req: Any = SimpleNamespace(
            origin_input_ids=[1, 2, 3, 4], output_ids=[], cached_tokens=0, return_routed_experts=True,
            routed_experts_start_len=0, kv=SimpleNamespace(req_pool_idx=0, kv_committed_len=0),
        )  # fmt: skip

    def run(self, start: int, slots: list[int], *, late: bool = False) -> Any:
        """One pass over tokens start, … into `slots`; `late`: the copy to the host ends after the pass."""
        self.passes += 1
        where = torch.tensor(slots)
        self.pool.req_to_token[0, start : start + len(slots)] = where
        cache = self.capturer.host_cache
        self.req.kv.kv_committed_len = start + len(slots)
        if late:
            output = SimpleNamespace(host_cache=cache, out_cache_loc=where)
            routing_rows.stamp_pass(output, self.capturer, None)
            return output
        cache.buffer[where] = self.passes
        routing_rows.stamp_pass(None, self.capturer, SimpleNamespace(out_cache_loc=where))
        return None

    def end(self) -> tuple[list[int], list[tuple[int, int, int, str]]]:
        """The request ends: the pass of each row, and its runs."""
        n = len(self.req.origin_input_ids) + len(self.req.output_ids) - 1 - self.req.routed_experts_start_len
        self.req.routed_experts = torch.zeros(n, LAYERS, K, dtype=torch.int32)
        routing_rows.answer(None, SimpleNamespace(req_to_token_pool=self.pool), self.req)
        found = decode_rows(self.req.routed_experts.numpy().tobytes(), rows=n, layers=LAYERS, k=K)
        assert found.runs is not None and found.layers is not None and found.layers.tolist() == [1, 2]
        return found.experts[:, 0, 0].tolist(), [(r.start, r.end, r.version, r.source) for r in found.runs]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_rows_of_a_prefix_are_of_the_weights_that_wrote_its_slots(engine: Engine) -> None:
    """An older policy's rows in the cache: the request's own version says nothing of them."""
    engine.version = 3
    engine.run(0, [5, 6])
    engine.version = 4
    engine.run(2, [7, 8])
    engine.req.cached_tokens, engine.req.output_ids = 2, [9]
    assert engine.end() == ([1, 1, 2, 2], [(0, 2, 3, "cached"), (2, 4, 4, "prefilled")])
    # The pass that samples the first token reads the last one of the prompt, though all of it was in the cache.
    engine.req.cached_tokens = 4
    assert engine.end()[1] == [(0, 2, 3, "cached"), (2, 3, 4, "cached"), (3, 4, 4, "prefilled")]


def test_a_retraction_keeps_what_sampling_recorded_and_says_who_did_the_rest(engine: Engine) -> None:
    """Fault 25."""
    engine.run(0, [1, 2, 3, 4])
    engine.req.output_ids = [11]
    engine.run(4, [5])
    engine.req.output_ids = [11, 12]
    for version, slots in ((7, [10, 11, 12, 13, 14, 15]), (8, [20, 21, 22, 23, 24, 25, 26])):
        routing_rows.keep_rows(req=engine.req, req_to_token_pool=engine.pool)
        engine.version = version
        engine.run(0, slots)
        engine.req.output_ids.append(13)
    # Row 5 is of the first second reading, which sampled the token behind it; row 6 of the second one.
    assert engine.end() == (
        [1, 1, 1, 1, 2, 3, 4],
        [(0, 4, 0, "prefilled"), (4, 5, 0, "sampled"), (5, 6, 7, "sampled"), (6, 7, 8, "sampled")],
    )
    engine.req.routed_experts_start_len = 3
    assert engine.end() == (
        [1, 2, 3, 4],
        [(3, 4, 0, "prefilled"), (4, 5, 0, "sampled"), (5, 6, 7, "sampled"), (6, 7, 8, "sampled")],
    )
    engine.req.routed_experts_start_len = 0
    # Planted: what the slots hold after all, which is what SGLang itself would answer.
    engine.req.moe_kept = None
    assert engine.end()[0] == [4] * 7
    engine.req.routed_experts_start_len = 3
    assert engine.end() == ([4] * 4, [(3, 4, 8, "prefilled"), (4, 7, 8, "sampled")])


def test_a_request_thrown_out_before_its_first_token_keeps_nothing(engine: Engine) -> None:
    engine.run(0, [1, 2])
    routing_rows.keep_rows(req=engine.req, req_to_token_pool=engine.pool)
    engine.version = 1
    engine.run(0, [10, 11, 12, 13])
    engine.req.output_ids = [11]
    assert engine.end() == ([2] * 4, [(0, 4, 1, "prefilled")])


def test_a_copy_that_ends_late_is_of_the_weights_of_its_pass(engine: Engine) -> None:
    engine.run(0, [1, 2, 3, 4])
    engine.req.output_ids = [11]
    output = engine.run(4, [5], late=True)
    engine.version = 9
    routing_rows.stamp_late(None, output)
    engine.req.output_ids = [11, 12]
    assert engine.end()[1] == [(0, 4, 0, "prefilled"), (4, 5, 0, "sampled")]
