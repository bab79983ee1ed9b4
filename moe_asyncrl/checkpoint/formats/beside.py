"""What a checkpoint in another format must remember of the HF files that it was made from, to give them back.

A few files in the folder `source/` beside its `config.json`. Nothing is imported for plain checkpoints.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from moe_asyncrl.models.features import BEHIND
from moe_asyncrl.models.hf_config import quantization_of
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.stored_names import MTP_FILE, SOURCE

CONFIG = "config.json"


def source_form(directory: Path, spec: ModelSpec, config: bytes) -> dict[str, bytes]:
    """Files by their name beside `config.json`: the form of kept multi-token-prediction layers, where it is not the
    usual one; of FP8 weights the published scales (`formats.scales`) and `config`, with its `quantization_config`.

    Raises UserError for a damaged checkpoint.
    """
    files: dict[str, bytes] = {}
    if spec.kept_mtp_layers and spec.mtp_form != BEHIND:
        files[MTP_FILE] = json.dumps(asdict(spec.mtp_form)).encode()
    quantization = quantization_of(directory)
    if quantization is not None and quantization.method == "fp8":
        from moe_asyncrl.checkpoint.formats.scales import collected
        from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir

        with SafetensorsDir(directory) as stored:
            files |= collected(stored, frozenset(t.name for t in parameter_map(spec).hf_tensors()))
        files[CONFIG] = config
    return {f"{SOURCE}/{name}": content for name, content in files.items()}
