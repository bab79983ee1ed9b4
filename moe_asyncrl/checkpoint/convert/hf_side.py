"""An HF directory as a source: its tensors checked against the model, by name, shape and type, all at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_asyncrl.checkpoint.convert.contents import FileTable, stored_content
from moe_asyncrl.checkpoint.convert.dtypes import WEIGHTS
from moe_asyncrl.checkpoint.convert.hf_files import Stored, read_directory
from moe_asyncrl.checkpoint.convert.keys import Keyed
from moe_asyncrl.checkpoint.convert.program import Content
from moe_asyncrl.checkpoint.ledger import Ledger
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.families.mtp import described, is_of_mtp
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.spec import ModelSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class HfCheckpoint:
    """Whole and of this model; `tensors` are those of the map."""

    directory: Path
    tensors: Mapping[str, Stored]
    spare_head: Stored | None
    """The output layer of a tied model that stores it all the same: it must equal the embedding."""

    def content(self, name: str, start: int, stop: int, table: FileTable) -> Content:
        """Rows [start, stop) of a tensor."""
        return stored_content(self.tensors[name], start, stop, table)

    def close(self) -> None:
        """Nothing is open."""


def open_hf(directory: Path, spec: ModelSpec) -> HfCheckpoint:
    """Look at the headers of a checkpoint.

    Raises:
        UserError: it is damaged; tensors are missing, extra, or of another shape or type than the model's (all of them
            named); nobody said what becomes of multi-token-prediction weights.
    """
    stored = read_directory(directory)
    wanted = {t.name: t for t in parameter_map(spec).hf_tensors()}
    spare = stored.get(HEAD) if spec.tie_embeddings else None
    left_out = unused_mtp(stored, spec, directory)
    ledger = Ledger(wanted, what="HF tensors", where=str(directory))
    for name in stored:
        if name not in left_out and not (spare is not None and name == HEAD):
            ledger.enter(name)
    ledger.settle()
    problems = [
        f"{name} is {list(stored[name].shape)}, the model needs {list(tensor.shape)} ({stored[name].file.name})"
        for name, tensor in wanted.items()
        if stored[name].shape != tensor.shape
    ]
    if spare is not None and spare.shape != (spec.vocab_size, spec.hidden_size):
        problems.append(f"{HEAD} is {list(spare.shape)}, the model needs {[spec.vocab_size, spec.hidden_size]}")
    problems += [
        f"{name} is {stored[name].dtype}; weights are {', '.join(WEIGHTS)}"
        for name in wanted
        if stored[name].dtype not in WEIGHTS
    ]
    if problems:
        raise UserError(f"{directory}: {len(problems)} tensors do not fit the model: {'; '.join(problems)}")
    return HfCheckpoint(directory, {name: stored[name] for name in wanted}, spare)


def kind_types(parameters: Iterable[Keyed], tensors: Mapping[str, Stored], directory: Path) -> dict[str, str]:
    """The type of each kind of parameter, by `Keyed.kind`.

    Raises:
        UserError: tensors of one kind that have different types, all of those named that most others are not like.
    """
    found: dict[str, dict[str, str]] = {}
    for keyed in parameters:
        for tensor in keyed.entry.hf:
            found.setdefault(keyed.kind, {})[tensor.name] = tensors[tensor.name].dtype
    problems, types = [], {}
    for kind, by_name in found.items():
        types[kind] = Counter(by_name.values()).most_common(1)[0][0]
        problems += [
            f"{name} is {dtype}, others of its kind {types[kind]}"
            for name, dtype in by_name.items()
            if dtype != types[kind]
        ]
    if problems:
        raise UserError(
            f"{directory}: {len(problems)} tensors have another type than their kind: {'; '.join(problems)}"
        )
    return types


def unused_mtp(names: Iterable[str], spec: ModelSpec, directory: Path) -> frozenset[str]:
    """Tensors of multi-token-prediction layers that are left out by an explicit word. Raises UserError without one."""
    if spec.mtp == "keep":
        return frozenset()
    found = frozenset(name for name in names if is_of_mtp(spec, name))
    if found and spec.mtp == "unsaid":
        raise UserError(
            f"{directory} holds {described(spec, found)}; say what becomes of them: `--mtp keep`, or `--mtp drop` to "
            "go on without them"
        )
    return found
