"""The files beside the weights: configuration, tokenizer, templates. They travel with a checkpoint both ways."""

from __future__ import annotations

import json
from pathlib import Path

from moe_asyncrl.checkpoint.safetensors_header import INDEX
from moe_asyncrl.data.errors import UserError

FOLDER = "hf"
"""Where a distributed checkpoint keeps them."""
SOURCE_INDEX = "source.index.json"
"""There, the index of the HF checkpoint: which file had which tensor."""
CONVERTED = "converted.json"
"""There, a mark: the weights have the types of the HF checkpoint that they come from."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def read_carried(directory: Path) -> dict[str, bytes]:
    """Name and content of every file of an HF directory that holds no weights. Raises UserError without a config."""
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory / 'config.json'} does not exist: is {directory} a Hugging Face model directory?")
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in _WEIGHTS
        and not path.name.endswith(".index.json")
        and path.name != CONVERTED
    }


def source_index(directory: Path) -> dict[str, bytes]:
    """The index of an HF directory, to be carried; nothing where there is one file."""
    path = directory / INDEX
    return {SOURCE_INDEX: path.read_bytes()} if path.is_file() else {}


def was_converted(checkpoint: Path) -> bool:
    """Whether a distributed checkpoint was converted from HF, and not written by Megatron-Core."""
    return (checkpoint / FOLDER / CONVERTED).is_file()


def with_config(carried: dict[str, bytes], *, drops_mtp: bool, dtype: str | None) -> dict[str, bytes]:
    """The same files with a config that says what was done to the weights.

    `drops_mtp`: there are no multi-token-prediction layers any more. `dtype`: the weights are of this type, and not
    quantised; None: as they were. A config that says so already keeps its bytes.
    """
    config = json.loads(carried["config.json"])
    changes: dict[str, object] = {}
    if drops_mtp:
        changes |= {name: 0 for name in ("num_nextn_predict_layers", "num_mtp_layers") if name in config}
    if dtype is not None:
        names = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
        changes |= dict.fromkeys(names, dtype)
    dequantised = dtype is not None and "quantization_config" in config
    if not dequantised and all(config.get(name) == value for name, value in changes.items()):
        return carried
    config.update(changes)
    if dequantised:
        del config["quantization_config"]
    return carried | {"config.json": (json.dumps(config, indent=2) + "\n").encode()}
