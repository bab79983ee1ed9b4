"""Opening a checkpoint of either kind to look at it: what it is, whose configuration it has, what it comes to in HF."""

from __future__ import annotations

from pathlib import Path

from moe_asyncrl.checkpoint.convert.carried import FOLDER
from moe_asyncrl.checkpoint.convert.distcp import DistcpDir, is_distcp
from moe_asyncrl.checkpoint.convert.hf_files import read_directory
from moe_asyncrl.checkpoint.convert.hf_side import HfCheckpoint, open_hf
from moe_asyncrl.checkpoint.convert.megatron_side import MegatronCheckpoint, open_megatron
from moe_asyncrl.checkpoint.safetensors_header import has_weights
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.families.mtp import is_of_mtp
from moe_asyncrl.models.features import Mtp
from moe_asyncrl.models.spec import ModelSpec

EitherCheckpoint = HfCheckpoint | MegatronCheckpoint


def is_megatron(path: Path) -> bool:
    """True for a distributed checkpoint, False for an HF one. Raises UserError for neither."""
    if not path.is_dir():
        raise UserError(f"{path} does not exist, or is no directory")
    if is_distcp(path):
        return True
    if has_weights(path):
        return False
    raise UserError(f"{path} is neither an HF directory with safetensors files nor a distributed checkpoint")


def config_of(path: Path, config: Path | None, *others: Path) -> Path:
    """The HF directory that has a checkpoint's configuration: the one that is named, its own, or one of `others`.

    Raises UserError if there is none.
    """
    for candidate in (config, path / FOLDER, path, *others):
        if candidate is not None and (candidate / "config.json").is_file():
            return candidate
    raise UserError(f"{path} has no config.json: name an HF directory of the model with `--config HF_DIR`")


def open_whole(path: Path, config: Path, mtp: Mtp | None) -> tuple[EitherCheckpoint, ModelSpec]:
    """A checkpoint that is whole and of the model of `config`; multi-token-prediction layers as they are found.

    Raises UserError as `open_hf` and `open_megatron` do.
    """
    spec = ModelSpec.from_hf(config)
    if is_megatron(path):
        kept = any(key.startswith("mtp.") for key in DistcpDir.open(path).tensors)
        spec = spec.with_mtp(mtp or ("keep" if kept else "drop"))
        return open_megatron(path, spec), spec
    kept = any(is_of_mtp(spec, name) for name in read_directory(path))
    spec = spec.with_mtp(mtp or ("keep" if kept else "drop"))
    return open_hf(path, spec), spec


def open_as_it_is(path: Path, config: Path | None, mtp: Mtp | None, *others: Path) -> EitherCheckpoint:
    """A checkpoint to compare: an HF one with whatever it holds, a distributed one as HF tensors. Raises UserError."""
    if is_megatron(path):
        return open_whole(path, config_of(path, config, *others), mtp)[0]
    tensors = read_directory(path)
    if mtp == "drop":
        spec = ModelSpec.from_hf(config_of(path, config, *others))
        tensors = {name: tensor for name, tensor in tensors.items() if not is_of_mtp(spec, name)}
    return HfCheckpoint(path, tensors, None)
