"""`verify` and `diff`: whether a checkpoint is whole, and how two of them differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from moe_asyncrl.checkpoint.convert.compare_plan import Total, compare_tensors
from moe_asyncrl.checkpoint.convert.contents import FileTable
from moe_asyncrl.checkpoint.convert.crew import worker_count
from moe_asyncrl.checkpoint.convert.hf_files import Stored
from moe_asyncrl.checkpoint.convert.opening import config_of, is_megatron, open_as_it_is, open_whole
from moe_asyncrl.checkpoint.convert.progress import gigabytes
from moe_asyncrl.checkpoint.convert.to_hf import Checkpoint
from moe_asyncrl.models.features import Mtp

Say = Callable[[str], None]


def verify(a: Path, b: Path | None, *, config: Path | None, mtp: Mtp | None, workers: int | None, say: Say) -> bool:
    """Check that each checkpoint is whole; with `b` also that their weights are equal. True if all is well.

    Raises:
        UserError: a checkpoint is not whole, with all that is wrong with it.
    """
    count = worker_count(workers)
    found = []
    for path, other in ((a, b), (b, a)):
        if path is None:
            continue
        others = () if other is None else (other,)
        kind = "distributed" if is_megatron(path) else "HF"
        checkpoint, spec = open_whole(path, config_of(path, config, *others), mtp)
        try:
            check_readable(checkpoint)
        finally:
            checkpoint.close()
        size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        say(f"{path}: a whole {kind} checkpoint of {spec.family}: {len(checkpoint.tensors)} tensors, {gigabytes(size)}")
        found.append(checkpoint)
    if len(found) == 1:
        return True
    return report(*found, workers=count, say=say)


def diff(a: Path, b: Path, *, config: Path | None, mtp: Mtp | None, workers: int | None, say: Say) -> bool:
    """Say how the weights of two checkpoints differ. True if they do not.

    Raises:
        UserError: a checkpoint is damaged.
    """
    count = worker_count(workers)
    return report(open_as_it_is(a, config, mtp, b), open_as_it_is(b, config, mtp, a), workers=count, say=say)


def check_readable(checkpoint: Checkpoint) -> None:
    """Look into every chunk of every tensor, without its values. Raises UserError where one is missing or damaged."""
    for name, tensor in checkpoint.tensors.items():
        checkpoint.content(name, 0, tensor.shape[0] if tensor.shape else 1, FileTable())


def report(a: Checkpoint, b: Checkpoint, *, workers: int, say: Say) -> bool:
    """A line for each tensor that is not the same on both sides, and one for all. True if there is none."""
    alone = [f"{name}  only in {a.directory}" for name in a.tensors if name not in b.tensors]
    alone += [f"{name}  only in {b.directory}" for name in b.tensors if name not in a.tensors]
    shared = [name for name in a.tensors if name in b.tensors]
    shapes = [
        f"{name}  {_looks(a.tensors, name)} and {_looks(b.tensors, name)}"
        for name in shared
        if a.tensors[name].shape != b.tensors[name].shape
    ]
    same = [name for name in shared if a.tensors[name].shape == b.tensors[name].shape]
    types = [name for name in same if a.tensors[name].dtype != b.tensors[name].dtype]
    totals = compare_tensors(a, b, [(name, name) for name in same], workers, "compare")
    for checkpoint in (a, b):
        checkpoint.close()
    for line in (*alone, *shapes):
        say(line)
    unlike = [total for total in totals if total.differing or total.name in types]
    for total in unlike:
        say(_line(total, a.tensors, b.tensors))
    wrong = len(alone) + len(shapes) + len(unlike)
    elements = sum(total.elements for total in totals)
    say(
        f"{wrong} of {len(a.tensors.keys() | b.tensors.keys())} tensors differ"
        if wrong
        else f"equal bit by bit: {len(totals)} tensors, {elements} elements"
    )
    return not wrong


def _line(total: Total, a: Mapping[str, Stored], b: Mapping[str, Stored]) -> str:
    types = "" if a[total.name].dtype == b[total.name].dtype else f"  {a[total.name].dtype} and {b[total.name].dtype}"
    return f"{total.name}  {total.differing} of {total.elements} elements differ, by at most {total.largest:.6g}{types}"


def _looks(tensors: Mapping[str, Stored], name: str) -> str:
    return f"{tensors[name].dtype} {list(tensors[name].shape)}"
