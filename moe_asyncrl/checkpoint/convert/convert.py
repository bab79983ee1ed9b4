"""Both directions from beginning to end: look at the source, plan, carry out what is not done yet, publish."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from moe_asyncrl.checkpoint.convert.carried import (
    CONVERTED,
    FOLDER,
    SOURCE_INDEX,
    read_carried,
    source_index,
    with_config,
)
from moe_asyncrl.checkpoint.convert.compare_plan import compare_tensors
from moe_asyncrl.checkpoint.convert.crew import WorkerError, run_units, worker_count
from moe_asyncrl.checkpoint.convert.distcp import METADATA, check_format
from moe_asyncrl.checkpoint.convert.hf_files import NewFile
from moe_asyncrl.checkpoint.convert.hf_side import EMBEDDING, HEAD, HfCheckpoint, open_hf
from moe_asyncrl.checkpoint.convert.keys import LayerKeys, can_stack, default_layer_keys, is_mtp_copy
from moe_asyncrl.checkpoint.convert.megatron_side import open_megatron, original_of_copy
from moe_asyncrl.checkpoint.convert.program import Finished, WriteUnit
from moe_asyncrl.checkpoint.convert.progress import Progress, gigabytes
from moe_asyncrl.checkpoint.convert.to_hf import SHARD_BYTES, plan_to_hf
from moe_asyncrl.checkpoint.convert.to_megatron import plan_to_megatron, sources_of
from moe_asyncrl.checkpoint.convert.workspace import Identity, Workspace, source_files, workspace
from moe_asyncrl.checkpoint.formats.beside import source_form
from moe_asyncrl.checkpoint.safetensors_header import read_weight_map
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.features import Mtp
from moe_asyncrl.models.hf_config import quantization_of
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.stored_names import SOURCE

if TYPE_CHECKING:
    from moe_asyncrl.checkpoint.convert.fp8_form import Fp8Form

Form = Literal["plain", "fp8"]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def hf_to_megatron(
    source: Path, out: Path, *, mtp: Mtp = "unsaid", layer_keys: LayerKeys | None = None, workers: int | None = None
) -> None:
    """Write the HF checkpoint `source` as a distributed checkpoint to the new directory `out`.

    Raises:
        UserError: the source is damaged or is not the model that its config says; `out` is taken; the disk is full; a
            worker died. What is done is kept beside `out`, and the same call goes on from there.
    """
    spec = ModelSpec.from_hf(source).with_mtp(mtp)
    layers = _layer_keys(spec, layer_keys)
    carried = read_carried(source)
    with workspace(out) as place:
        stored = open_hf(source, spec)
        quantised = any(tensor.offset is None for tensor in stored.tensors.values())
        count = worker_count(workers, computes=quantised)
        _check_copies(stored, spec, count)
        plan = plan_to_megatron(stored, spec, layers)
        beside = with_config(carried, drops_mtp=spec.mtp == "drop", dtype="bfloat16" if quantised else None)
        config = with_config(carried, drops_mtp=spec.mtp == "drop", dtype=None)["config.json"]
        beside |= source_index(source) | source_form(source, spec, config)
        beside |= {CONVERTED: b"{}\n"}
        others = plan.others | {f"{FOLDER}/{name}": content for name, content in beside.items()}
        options = {"mtp": mtp, "layer_keys": layers}
        read = [*sources_of(stored), source / "config.json"]
        identity = Identity("hf-to-megatron", source_files(read), options, _digest(plan.units, others))
        place.bind(identity)
        _carry_out(place, plan.units, count, source)
        place.check_unchanged(read, identity)
        _publish(place, others)


def megatron_to_hf(
    source: Path,
    out: Path,
    *,
    config: Path | None = None,
    mtp: Mtp = "unsaid",
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    form: Form = "plain",
    workers: int | None = None,
) -> None:
    """Write the weights of the distributed checkpoint `source` as an HF checkpoint to the new directory `out`.

    `config` is an HF directory that has config.json and tokenizer; by default what the checkpoint carries. `dtype` is
    as in `open_megatron`. With the form `fp8`, the weights that were published in FP8 are written so again, as
    `formats.encode` says.

    Raises:
        UserError: as `hf_to_megatron`.
    """
    carried_dir = carried_folder(source, config)
    spec = ModelSpec.from_hf(carried_dir).with_mtp(mtp)
    carried = read_carried(carried_dir)
    with workspace(out) as place:
        stored = open_megatron(source, spec, dtype)
        published = _published_form(source, carried_dir) if form == "fp8" else None
        try:
            encoder = _fp8_form(published)
            plan = plan_to_hf(stored, _weight_map(carried_dir), shard_bytes=shard_bytes, form=encoder)
        finally:
            stored.close()
        written = stored.tensors[EMBEDDING].dtype
        named = dtype is not None or "quantization_config" in json.loads(carried["config.json"])
        if published is not None:
            carried, named = carried | {"config.json": (published / "config.json").read_bytes()}, False
        beside = with_config(carried, drops_mtp=spec.mtp == "drop", dtype=written if named else None)
        others = plan.others | beside
        options = {"mtp": mtp, "shard_bytes": shard_bytes, "dtype": dtype, "form": form}
        names = {chunk.slot.file for tensor in stored.source.tensors.values() for chunk in tensor.chunks}
        read = [*(source / name for name in names), source / METADATA, carried_dir / "config.json"]
        files = source_files(read)
        if published is not None:
            files |= {
                f"{SOURCE}/{path.name}": stamp
                for path in published.iterdir()
                for stamp in source_files([path]).values()
            }
        identity = Identity("megatron-to-hf", files, options, _digest(plan.units, others))
        place.bind(identity)
        _begin_files(place, plan.files)
        _carry_out(place, plan.units, worker_count(workers, computes=form == "fp8"), source)
        place.check_unchanged(read, identity)
        _publish(place, others)


def _published_form(source: Path, carried: Path) -> Path:
    """Where the published FP8 config and scales are: carried, or in the HF directory that was named."""
    for candidate in (carried / SOURCE, carried):
        found = quantization_of(candidate)
        if found is not None and found.method == "fp8":
            return candidate
    raise UserError(
        f"{source} was not made from FP8 weights, so it cannot be written as FP8; leave `--form fp8` out, or name the "
        "published FP8 checkpoint with `--config HF_DIR`"
    )


def _fp8_form(published: Path | None) -> Fp8Form | None:
    if published is None:
        return None
    from moe_asyncrl.checkpoint.convert.fp8_form import Fp8Form

    return Fp8Form(published)


def carried_folder(source: Path, config: Path | None) -> Path:
    """Where config.json and tokenizer of a distributed checkpoint are. Raises UserError if nowhere, or it is none."""
    check_format(source)
    if config is not None:
        if not config.is_dir():
            raise UserError(
                f"--config {config} is no directory: name the HF directory that has the model's config.json"
            )
        return config
    if not (source / FOLDER / "config.json").is_file():
        raise UserError(
            f"{source} carries no {FOLDER}/config.json: name an HF directory of the model with `--config HF_DIR`"
        )
    return source / FOLDER


def _layer_keys(spec: ModelSpec, asked: LayerKeys | None) -> LayerKeys:
    if asked == "stacked" and not can_stack(spec):
        raise UserError(
            "--layer-keys stacked: the model has dense and mixture-of-experts layers, which Megatron-Core keeps under "
            "separate keys; leave the option out"
        )
    return asked or default_layer_keys(spec)


def _check_copies(stored: HfCheckpoint, spec: ModelSpec, workers: int) -> None:
    """Copies of embedding and output layer are not stored twice, so they must be equal to them."""
    pairs = [
        (entry.hf[0].name, original_of_copy(entry, spec)) for entry in parameter_map(spec).entries if is_mtp_copy(entry)
    ]
    tensors = dict(stored.tensors)
    if stored.spare_head is not None:
        tensors[HEAD] = stored.spare_head
        pairs.append((HEAD, EMBEDDING))
    if not pairs:
        return
    looked = HfCheckpoint(stored.directory, tensors, None)
    unlike = [t for t in compare_tensors(looked, looked, pairs, workers, None) if t.differing]
    if unlike:
        names = dict(pairs)
        raise UserError(
            f"{stored.directory}: {len(unlike)} tensors should equal others, which Megatron-Core stores alone, and do "
            "not: " + ", ".join(f"{t.name} differs from {names[t.name]} in {t.differing} elements" for t in unlike)
        )


def _digest(units: Iterable[WriteUnit], others: dict[str, bytes]) -> str:
    """Of what is written where, and from which place of which file; a source may have moved as a whole."""
    found = hashlib.sha256()
    for unit in units:
        names = tuple(Path(name).name for name in unit.files)
        found.update(msgspec.json.encode(msgspec.structs.replace(unit, files=names)))
    for name, content in sorted(others.items()):
        found.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return found.hexdigest()


def _weight_map(carried: Path) -> dict[str, str] | None:
    path = carried / SOURCE_INDEX
    return read_weight_map(path) if path.is_file() else None


def _begin_files(place: Workspace, files: Iterable[NewFile]) -> None:
    """Headers, and room behind them; a file that has both was begun before."""
    for file in files:
        path = place.path / file.name
        if path.is_file() and path.stat().st_size == file.size:
            with path.open("rb") as begun:
                if begun.read(len(file.header)) == file.header:
                    continue
        place.forget(file.name)
        with _one_line(path), path.open("wb") as begun:
            begun.write(file.header)
            begun.truncate(file.size)


def _carry_out(place: Workspace, units: Sequence[WriteUnit], workers: int, source: Path) -> None:
    waiting = [unit for unit in units if unit.number not in place.done]
    targets = {unit.number: unit.target for unit in waiting}
    total, left = sum(unit.moved for unit in units), sum(unit.moved for unit in waiting)
    _check_room(place, left, [place.path / unit.target for unit in waiting])
    progress = Progress("convert", total, before=total - left)

    def finished(answer: Finished) -> None:
        place.record(answer.number, targets[answer.number])

    try:
        run_units(
            (msgspec.structs.replace(unit, target=str(place.path / unit.target)) for unit in waiting),
            workers,
            moved=progress.add,
            finished=finished,
        )
    except (WorkerError, OSError) as error:
        progress.abandon()
        number = error.number if isinstance(error, WorkerError) else error.errno
        text = str(error) if isinstance(error, WorkerError) else f"{place.path}: {error.strerror}"
        more = "; make room and repeat" if number in _FULL else "; repeat"
        raise UserError(
            f"{source}: {text}{more} the same command: it goes on from what is done ({len(place.done)} of {len(units)} "
            f"parts, kept in {place.path})"
        ) from None
    except UserError as error:
        progress.abandon()
        raise UserError(f"{error}; mend the source or fetch it again, remove {place.path}, and start anew") from None
    except BaseException:
        progress.abandon()
        raise
    progress.finish()


def _check_room(place: Workspace, left: int, targets: Iterable[Path]) -> None:
    """Say at once that the disk is too small. What was begun before has blocks already."""
    begun = sum(path.stat().st_blocks * 512 for path in set(targets) if path.is_file())
    free = shutil.disk_usage(place.path).free
    if free + begun < left:
        raise UserError(
            f"{place.out.parent} has {gigabytes(free)} free, the conversion needs {gigabytes(left - begun)}; make "
            "room and repeat the same command"
        )


def _publish(place: Workspace, others: dict[str, bytes]) -> None:
    with _one_line(place.path):
        place.publish(others)


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Errors of the operating system, such as a full disk, as a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; mend that and repeat the same command: it goes on from what is done"
        ) from None
