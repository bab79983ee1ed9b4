"""A distributed checkpoint as a source: its keys checked against the model, and each HF tensor found in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moe_asyncrl.checkpoint.convert.carried import was_converted
from moe_asyncrl.checkpoint.convert.contents import FileTable, tensor_content
from moe_asyncrl.checkpoint.convert.distcp import DistcpDir, GlobalTensor
from moe_asyncrl.checkpoint.convert.dtypes import WEIGHTS
from moe_asyncrl.checkpoint.convert.hf_files import Stored
from moe_asyncrl.checkpoint.convert.keys import Keyed, is_mtp_copy, keyed_parameters, layer_keys_of
from moe_asyncrl.checkpoint.convert.links import Link, links_of
from moe_asyncrl.checkpoint.convert.program import Content
from moe_asyncrl.checkpoint.ledger import Ledger
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.algebra import HfTensor
from moe_asyncrl.models.parameter_map import Entry, parameter_map
from moe_asyncrl.models.spec import ModelSpec

_OF_TRAINING = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state", "opt_param_scheduler")
"""What a training checkpoint holds beside weights; it is passed over."""
Placed = tuple[Link, GlobalTensor, tuple[int, ...]]


@dataclass
class MegatronCheckpoint:
    """Whole and of this model. `tensors` are the HF tensors that it comes to, with no place of their own.

    Their types are those that they shall have in HF; values of another type are rounded to them.
    """

    source: DistcpDir
    tensors: Mapping[str, Stored]
    _links: Mapping[str, list[Placed]] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        """Where it is."""
        return self.source.directory

    def content(self, name: str, start: int, stop: int, table: FileTable) -> Content:
        """Rows [start, stop) of an HF tensor. Raises UserError where chunks are missing or damaged."""
        tensor = self.tensors[name]
        return tensor_content(self._links[name], tensor.shape, start, stop, tensor.dtype, self.source, table)

    def close(self) -> None:
        """Close the files that were looked into."""
        self.source.close()


def open_megatron(directory: Path, spec: ModelSpec, dtype: str | None = None) -> MegatronCheckpoint:
    """Look at the metadata of a checkpoint.

    Tensors have `dtype` in HF, but for those that have a type of their own there. By default a checkpoint that was
    converted from HF keeps what it has, since it has the types of its source; one that Megatron-Core wrote has the
    types of a model in memory, so the config's type is taken.

    Raises:
        UserError: it is damaged or incomplete; keys are missing, extra, or of another shape or type (all of them
            named); nobody said what becomes of multi-token-prediction weights.
    """
    source = DistcpDir.open(directory)
    weights = {key: tensor for key, tensor in source.tensors.items() if not key.startswith(_OF_TRAINING)}
    _check_mtp(weights, spec, directory)
    if spec.mtp == "drop":
        weights = {key: tensor for key, tensor in weights.items() if not key.startswith("mtp.")}
    halves = [key for key in weights if key.endswith(("_w", "_v"))]
    if halves:
        raise UserError(
            f"{directory}: was saved with `singleton_local_shards`, which keeps gate and up apart ({halves[0]}); save "
            "it without that word of Megatron-Core's metadata"
        )
    parameters = list(keyed_parameters(spec, layer_keys_of(iter(weights))))
    stored = _settle(parameters, weights, directory)
    _check(parameters, stored, directory)
    source.look_ahead()
    links: dict[str, list[Placed]] = {}
    types: dict[str, str] = {}
    for keyed in parameters:
        tensor = stored[keyed.keys[0]]
        for link in links_of(keyed.entry):
            links.setdefault(link.hf.name, []).append((link, tensor, tuple(lead.index for lead in keyed.lead)))
            types[link.hf.name] = _hf_type(link.hf, tensor, spec, dtype, keeps=was_converted(directory))
    for entry in parameter_map(spec).entries:
        if is_mtp_copy(entry):
            name, original = entry.hf[0].name, original_of_copy(entry, spec)
            links[name], types[name] = links[original], types[original]
    tensors = {
        t.name: Stored(t.name, t.shape, types[t.name], directory, None) for t in parameter_map(spec).hf_tensors()
    }
    return MegatronCheckpoint(source, tensors, links)


def _hf_type(hf: HfTensor, stored: GlobalTensor, spec: ModelSpec, asked: str | None, *, keeps: bool) -> str:
    if keeps and (asked is None or hf.dtype is not None):
        return stored.dtype
    return hf.dtype or asked or spec.torch_dtype


def original_of_copy(entry: Entry, spec: ModelSpec) -> str:
    """The HF tensor that an HF tensor of `mtp_copy.` equals."""
    wanted = "embedding.word_embeddings.weight"
    if entry.name.endswith("output_layer.weight") and not spec.tie_embeddings:
        wanted = "output_layer.weight"
    return parameter_map(spec).find(wanted).hf[0].name


def _settle(parameters: list[Keyed], weights: Mapping[str, GlobalTensor], directory: Path) -> dict[str, GlobalTensor]:
    """The tensor of each parameter's first key, under whichever of its keys it is stored."""
    canonical = {key: keyed.keys[0] for keyed in parameters for key in keyed.keys}
    ledger = Ledger(set(canonical.values()), what="keys", where=str(directory))
    found: dict[str, GlobalTensor] = {}
    for key, tensor in weights.items():
        name = canonical.get(key, key)
        if name not in found:
            ledger.enter(name)
            found[name] = tensor
        elif [chunk.slot for chunk in found[name].chunks] != [chunk.slot for chunk in tensor.chunks]:
            raise UserError(
                f"{directory}: {key} and {found[name].key} are names of one parameter, but are stored apart: which of "
                "them counts is not known"
            )
    ledger.settle()
    return found


def _check(parameters: Iterable[Keyed], stored: Mapping[str, GlobalTensor], directory: Path) -> None:
    problems: dict[str, str] = {}
    for keyed in parameters:
        tensor, expected = stored[keyed.keys[0]], keyed.global_shape
        padded = keyed.entry.op.pads_rows and len(tensor.shape) == len(expected)
        fits = tensor.shape == expected or (
            padded and tensor.shape[0] >= expected[0] and tensor.shape[1:] == expected[1:]
        )
        if not fits:
            problems[tensor.key] = f"{tensor.key} is {list(tensor.shape)}, the model needs {list(expected)}"
        elif tensor.dtype not in WEIGHTS:
            problems[tensor.key] = f"{tensor.key} is {tensor.dtype}; weights are {', '.join(WEIGHTS)}"
    if problems:
        raise UserError(f"{directory}: {len(problems)} keys do not fit the model: {'; '.join(problems.values())}")


def _check_mtp(weights: Mapping[str, GlobalTensor], spec: ModelSpec, directory: Path) -> None:
    count = sum(key.startswith("mtp.") for key in weights)
    if count and spec.mtp == "unsaid":
        raise UserError(
            f"{directory} holds {count} tensors of multi-token-prediction layers; say what becomes of them: "
            "`--mtp keep`, or `--mtp drop` to go on without them"
        )
