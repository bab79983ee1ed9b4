"""In which form engines hold the weights of a model directory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from moe_asyncrl.checkpoint.formats.encode import Fp8
from moe_asyncrl.checkpoint.formats.scales import CheckpointScales
from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.models.hf_config import quantization_of
from moe_asyncrl.weights.coded import Coder


def served_form(path: Path, resources: ExitStack) -> Coder | None:
    """What quantises weights for engines that were started from `path`; None where they hold them plain.

    The files stay open until `resources` are closed: blocks that did not change get their published scales from there.

    Raises UserError if the weights are quantised in another form than FP8 in blocks, or damaged.
    """
    if quantization_of(path) is None:
        return None
    return Fp8(CheckpointScales(resources.enter_context(SafetensorsDir(path))))
