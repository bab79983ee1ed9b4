"""What a trainer's ranks do in the tests of coded weights: one update into a folder, beside the export of the same."""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_asyncrl.checkpoint.hf_export import export_hf
from moe_asyncrl.checkpoint.hf_load import load_hf
from moe_asyncrl.checkpoint.megatron_names import global_parameters
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.model import build_model
from moe_asyncrl.train.served_form import served_form
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.orders import Announce, Answer, AnyOrder, MakePlan, Open, Send
from moe_asyncrl.weights.rank_side import RankSide, Settings
from tests.pool.machine import CPU


def send_and_export(layout: Layout, hf_dir: str, out: str, bucket_bytes: int) -> list[tuple[int, int, int, int]]:
    """Send the published weights, then others: folders `sent0`, `sent1`. Export the others as FP8 to `exported`.

    Returns this rank's (folder, stream, number, bytes) of what it sent.
    """
    rank, spec = dist.get_rank(), ModelSpec.from_hf(hf_dir)
    chunks = build_model(spec, layout, CPU)
    load_hf(chunks, spec, layout, hf_dir)
    sent = []
    with ExitStack() as resources:
        settings = Settings(
            dtype=torch.bfloat16,
            bucket_bytes=bucket_bytes,
            roots_per_stage=0,
            timeout_s=60,
            keep_copies=False,
            max_fraction=0.5,
            coder=served_form(Path(hf_dir), resources),
        )
        side = RankSide(spec, layout, rank, lambda: global_parameters(chunks, spec, layout, rank), settings)

        def do(order: AnyOrder) -> None:
            answers: list[Any] = [None] * layout.world_size
            dist.all_gather_object(answers, side.do(order))
            assert all(isinstance(a, Answer) for a in answers)
            assert not (wrong := [a.problem or a.failed for a in answers if a.problem or a.failed]), wrong
            side.agreed(order, answers)

        do(MakePlan(mode="broadcast", engines=(EngineLayout(),)))
        for turn in (0, 1):
            do(Announce(version=turn, changes=False))
            do(Open(update=f"u{turn}", transport="disk", place=f"{out}/sent{turn}", readers=1, depth=2))
            do(Send(update=f"u{turn}", epoch=3, version=turn))
            sent += [(turn, x.stream, x.number, x.nbytes) for x in side.letters.get(rank, ())]
            if not turn:
                _change(global_parameters(chunks, spec, layout, rank))
        side.close()
    export_hf(chunks, spec, layout, f"{out}/exported", source_hf_dir=hf_dir, form="fp8")
    return sent


def _change(parameters: dict[str, torch.Tensor]) -> None:
    """Move one element in ten thousand, the same on all ranks that hold a copy: some blocks change, some do not."""
    with torch.no_grad():
        for name, value in parameters.items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value.add_(0.3 * (torch.rand(value.shape, generator=generator) < 1e-4))
