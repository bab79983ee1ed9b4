"""What Megatron-Core itself says about a layout."""

from __future__ import annotations

from moe_asyncrl.models.layout import Layout
from tests.pool.machine import CPU
from tests.train.parity_jobs import tiny_spec


def own_layers(layout: Layout, num_layers: int) -> list[list[int]]:
    """Global numbers (from 0) of the layers in each of this rank's chunks, as the built layers name themselves."""
    from moe_asyncrl.train.model import build_model

    spec = tiny_spec(num_layers=num_layers, moe_layers=(True,) * num_layers)
    return [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in build_model(spec, layout, CPU)]


def form_groups_alone(other: Layout | None = None) -> None:
    """Try to form the groups of a layout as the first of two ranks, of which the second never comes."""
    import tempfile
    from pathlib import Path

    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from moe_asyncrl.train.parallel import ParallelRuntime

    store = FileStore(str(Path(tempfile.mkdtemp()) / "store"), 2)
    runtime = ParallelRuntime(CPU, rank=0, world_size=2, store=store, timeout_s=1)
    runtime.setup(other or Layout(dp=2, ep=2))
