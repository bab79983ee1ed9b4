"""What replaying the sampler's routing costs: time of a step, bytes of the log, time from reply to each rank's slices.

    python -m benchmarks.replay --quick

`step_time_vs_live`: training steps with replay and without, on the same batches in turn, each pair in the other order
than the one before; the upper end of the 95 % interval of the median ratio. A step with replay counts everything from
the checked rows of a rank on: the micro-batches are made anew in both. On a machine that others use, look at the
`cpu_time` figures: the same pairs by the seconds in which the process had a core.
`bytes_vs_sglang`: our rows on the wire, with what binds them, against SGLang's own reply of the same rows, both without
any shared prompt.
"""

from __future__ import annotations

import argparse
import base64
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.pairs import median_interval
from benchmarks.report import print_result

LAYERS, TOP_K = 48, 8
ROWS = 2048
"""Rows of each trajectory whose bytes are counted."""


def rows_of(tokens: int, layers: int, top_k: int, experts: int, seed: int) -> np.ndarray:
    """Random rows [tokens - 1, layers, K], no expert twice in one."""
    draw = np.random.default_rng(seed)
    first = draw.integers(0, experts, (tokens - 1, layers, 1))
    return (first + np.arange(top_k) * (1 + draw.integers(0, experts // top_k - 1, first.shape))) % experts


def made(name: str, index: int, sample: int, tokens: np.ndarray, experts: np.ndarray) -> Any:
    """A trajectory, half of it sampled."""
    from moe_asyncrl.data.trajectory import Identity, PolicyAsked, RoutingRun, SamplingParams, Segment, Trajectory

    n, half = len(tokens), len(tokens) // 2
    sampled = np.arange(n) >= half
    return Trajectory(
        identity=Identity(trajectory=name, prompt="made", index=index, sample=sample, epoch=1),
        policy=PolicyAsked(base_version=0),
        segments=(
            Segment(start=0, end=half, role="user"),
            Segment(start=half, end=n, role="policy", sampling=SamplingParams(temperature=1.0)),
        ),
        tokens=tokens.astype(np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
        weight_version=np.where(sampled, 0, -1).astype(np.int32),
        routing_experts=experts,
        routing_runs=(RoutingRun(start=0, end=n - 1, version=0, source="sampled"),),
        rewards={"total": 1.0},
    )


def bytes_ratio(experts: int) -> float:
    """Bytes of the rows and of what binds and describes them, over those of SGLang's base64 of int32."""
    from moe_asyncrl.data.group_wire import encode_group

    ids = rows_of(ROWS + 1, LAYERS, TOP_K, experts, 0).astype(np.uint8 if experts <= 256 else np.uint16)
    t = made("a", 0, 0, np.arange(ROWS + 1), ids)
    with_rows, frames = encode_group([t], blocks=[(i, i + LAYERS // 4) for i in range(0, LAYERS, LAYERS // 4)])
    bare = msgspec.structs.replace(
        with_rows[0], routing_blocks=(), routing_runs=(), frames=tuple(f for f in with_rows[0].frames if f.field != RT)
    )
    header = len(msgspec.msgpack.encode(with_rows[0])) - len(msgspec.msgpack.encode(bare))
    ours = header + sum(len(f) for f, s in zip(frames, with_rows[0].frames, strict=True) if s.field == RT)
    theirs = len(base64.b64encode(ids.astype("<i4").tobytes()))
    return ours / theirs


RT = "routing.experts"


def to_slices(experts: int, *, trajectories: int) -> dict[str, float]:
    """Tokens a second from an engine's answer to the checked rows of each of 8 ranks (PP4, CP2), through a buffer."""
    from moe_asyncrl.buffer.ledger import Limits
    from moe_asyncrl.buffer.service import BufferService
    from moe_asyncrl.data import messages as m
    from moe_asyncrl.data.group_wire import encode_group
    from moe_asyncrl.data.row_slices import cut_array, cuts_of, digest_columns, slice_of, stored_rows
    from moe_asyncrl.engine.completion import RoutingShape, decode_experts
    from moe_asyncrl.models.layout import Layout
    from moe_asyncrl.replay.encoding import encode_rows
    from moe_asyncrl.train.rank_positions import positions_of_rank

    layout = Layout(pp=4, cp=2)
    shape = RoutingShape(moe_layers=(True,) * LAYERS, top_k=TOP_K, num_experts=experts)
    every = np.arange(LAYERS, dtype=np.uint16)
    blocks = [(i, i + LAYERS // 4) for i in range(0, LAYERS, LAYERS // 4)]
    captured = [rows_of(ROWS + 1, LAYERS, TOP_K, experts, i).astype(np.int32) for i in range(trajectories)]
    version, source = np.zeros(ROWS, dtype=np.int32), np.zeros(ROWS, dtype=np.int8)
    tokens = [np.random.default_rng(i).integers(0, 1000, ROWS + 1) for i in range(trajectories)]
    service = BufferService(Limits(groups_per_step=1, max_staleness=1, max_attempts=1, capacity=1))
    number = iter(range(1, 1 << 30))

    def ask(request: type[Any], frames: Sequence[Any] = (), **fields: Any) -> tuple[Any, Any]:
        head = {"epoch": 1, "sender": "bench", "request": next(number)}
        reply, out = service.handle(request(**{**head, **fields}), frames, 0.0)
        if isinstance(reply, m.Refused):
            raise RuntimeError(reply.reason)
        return reply, out

    ask(m.AcquireLease, epoch=0, holder="bench")
    ask(m.Begin, step=0, cursor=m.Cursor(), counters=m.Counters())
    ask(m.Commit, version=0, members=(), lost=())
    (ticket,) = ask(m.AskTickets, wanted=1, holding=())[0].tickets

    seconds: dict[str, float] = {}
    clock = time.perf_counter

    def lap(name: str, since: float) -> None:
        seconds[name] = seconds.get(name, 0.0) + clock() - since

    began = clock()
    answers = [base64.b64encode(encode_rows(0, every, c, version, source)).decode() for c in captured]
    lap("engine", began)
    began = clock()
    rows = [decode_experts(a, ROWS, shape, "bench") for a in answers]
    lap("reply", began)
    group = [made(str(i), ticket.index, i, tokens[i], r.experts) for i, r in enumerate(rows)]
    began = clock()
    headers, frames = encode_group(group, blocks=blocks)
    lap("encode", began)
    began = clock()
    ask(m.PutGroup, frames, ticket=ticket, headers=headers, failed=0)
    lap("put", began)
    ask(m.Take, step=1, version=0, groups=1)
    by_name = {h.identity.trajectory: h for h in headers}
    slowest = 0.0
    for rank in range(layout.world_size):
        at = positions_of_rank([ROWS] * trajectories, layout, rank)
        block = layout.coordinates(rank).pp
        needs = {str(i): np.sort(at.rows_of(i)) for i in range(trajectories)}
        stored = stored_rows(by_name, needs)
        cuts = cuts_of(stored)
        began = clock()
        _, sent = ask(m.FetchRows, step=1, blocks=(block,), cuts=tuple(cuts), digests=tuple(needs))
        lap("cut", began)
        began = clock()
        arrays = {
            c.trajectory: cut_array(by_name[c.trajectory], f, len(stored[c.trajectory]), (block,))
            for c, f in zip(cuts, sent, strict=False)
        }
        for name, frame in zip(needs, sent[len(cuts) :], strict=True):
            h = by_name[name]
            found = slice_of(
                h,
                needs[name],
                range(*blocks[block]),
                (block,),
                stored=stored,
                arrays=arrays,
                tokens=group[int(name)].tokens,
                columns=digest_columns(h, frame, (block,)),
            )
            if found.experts.shape != (ROWS // 2, LAYERS // 4, TOP_K):
                raise RuntimeError(f"rank {rank} got {found.experts.shape}")
        slowest = max(slowest, clock() - began)
    # Ranks check side by side; everything else is one process.
    total = seconds["reply"] + seconds["encode"] + seconds["put"] + seconds["cut"] + slowest
    count = ROWS * trajectories
    return {"reply_to_slices": count / total, "rank_check": count / slowest} | {
        k: count / s for k, s in seconds.items()
    }


class Steps:
    """A model on one process, and batches to train it on with rows and without."""

    def __init__(self, path: Path, sizes: dict[str, int], *, tokens: int) -> None:
        import torch
        import torch.distributed as dist

        from moe_asyncrl.config.capability import Capabilities
        from moe_asyncrl.config.recipe import Optimizer
        from moe_asyncrl.models.layout import Layout
        from moe_asyncrl.models.tiny import make_tiny_model
        from moe_asyncrl.train.build import build_train_state
        from moe_asyncrl.train.objective import PolicyObjective
        from moe_asyncrl.train.parallel import ParallelRuntime

        torch.set_num_threads(1)
        self.runtime = ParallelRuntime(Capabilities(), rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
        self.runtime.setup(Layout())
        self.spec = make_tiny_model(path / "model", "qwen3_moe", 0, **sizes)
        self.state = build_train_state(self.spec, Layout(), Capabilities(), Optimizer(), rank=0, hf_dir=path / "model")
        self.objective = PolicyObjective(clip_low=0.2, clip_high=0.28, importance_cap=2.0, temperature=1.0)
        self.tokens = tokens

    def step(self, batch: int, *, replay: bool) -> tuple[float, float]:
        """One update on the random samples of `batch`; its seconds, and those that this process had a core."""
        from moe_asyncrl.train.batch import Sample, make_micro_batch
        from moe_asyncrl.train.step import update

        draw, model, s = np.random.default_rng(batch), self.state.model, self.spec
        lengths = [self.tokens // 4] * 4
        samples = [
            Sample(
                name=f"{batch}.{i}",
                tokens=draw.integers(0, s.vocab_size, n + 1).astype(np.int32),
                trained=np.arange(n + 1) > n // 4,
                weight=1 / self.tokens,
                advantage=float(draw.normal()),
                sampler_logprobs=np.full(n + 1, -np.log(s.vocab_size), dtype=np.float32),
                experts=rows_of(n + 1, s.num_moe_layers, s.experts_per_token, s.num_experts, i).astype(np.uint8),
            )
            for i, n in enumerate(lengths)
        ]
        began, cpu = time.perf_counter(), time.process_time()
        batches = [
            make_micro_batch([a], layout=model.layout, router=model.router_shape if replay else None) for a in samples
        ]
        update(
            model, self.state.optimizer, batches, self.objective, lr=1e-6, mode="replay" if replay else "off",
        )  # fmt: skip
        return time.perf_counter() - began, time.process_time() - cpu


def main() -> None:
    """Measure, print the result."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer pairs: under 60 s on two cores")
    options.add_argument("--pairs", type=int, help="pairs of steps (default: 100, with --quick 24)")
    args = options.parse_args()
    pairs = args.pairs or (24 if args.quick else 100)
    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
    }
    tokens = 2048
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        steps = Steps(Path(scratch), sizes, tokens=tokens)
        for replay in (True, False):
            steps.step(0, replay=replay)  # the first ones prepare
        with_rows, live = [], []
        for pair in range(pairs):
            for replay in (True, False) if pair % 2 else (False, True):
                (with_rows if replay else live).append(steps.step(pair, replay=replay))
        steps.runtime.close()
    ratios, of_cpu = ([a[i] / b[i] for a, b in zip(with_rows, live, strict=True)] for i in (0, 1))
    low, high = median_interval(ratios)
    cpu_low, cpu_high = median_interval(of_cpu)
    speed = to_slices(128, trajectories=4 if args.quick else 16)
    print_result(
        "replay",
        ratios={
            "step_time_vs_live": high,
            "bytes_vs_sglang": bytes_ratio(128),
            "bytes_vs_sglang_384": bytes_ratio(384),
        },
        figures={
            "step_time_median": statistics.median(ratios),
            "step_time_low": low,
            "cpu_time_median": statistics.median(of_cpu),
            "cpu_time_low": cpu_low,
            "cpu_time_high": cpu_high,
            "live_step_s": statistics.median(a for a, _ in live),
            "replay_step_s": statistics.median(a for a, _ in with_rows),
            "live_step_cpu_s": statistics.median(a for _, a in live),
            **{f"{name}_tokens_per_s": rate for name, rate in speed.items()},
        },
        settings={"quick": args.quick, "pairs": pairs, "tokens": tokens, "rows": ROWS, **sizes},
    )


if __name__ == "__main__":
    main()
