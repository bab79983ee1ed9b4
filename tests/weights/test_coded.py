"""Weights for engines that hold FP8: what is sent is, bit for bit, what a checkpoint of the same weights stores."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_asyncrl.checkpoint.convert import convert
from moe_asyncrl.checkpoint.formats import fp8
from moe_asyncrl.checkpoint.formats.encode import Fp8
from moe_asyncrl.checkpoint.formats.scales import CheckpointScales
from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.engine.plugin.weights_learn import Assembly
from moe_asyncrl.models.algebra import HfTensor
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.shards import rank_shards
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.coded import CodedFiller, Coder, coded_message, coded_parts, letter_of
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.fill import WeightFiller
from moe_asyncrl.weights.letters import in_order
from moe_asyncrl.weights.message import dense_header, open_message, seal
from moe_asyncrl.weights.message_part import Part
from moe_asyncrl.weights.orders import MakePlan
from moe_asyncrl.weights.plan_check import check
from moe_asyncrl.weights.plan_make import make_plan
from moe_asyncrl.weights.rank_side import RankSide, Settings
from moe_asyncrl.weights.work import rank_work
from tests.checkpoint.formats.quantised import fp8_copy, same_bits
from tests.checkpoint.models import make
from tests.pool.pool import WorkerPool

Tensors = dict[str, torch.Tensor]

BLOCK = (32, 32)
"""Divides neither the experts' 80 rows nor all the others."""
EP2_PP2 = Layout(dp=2, ep=2, pp=2)
LAYOUTS = (EP2_PP2, Layout(tp=2), Layout(dp=2, tp=2, ep=2, etp=1))
BAND = 32 * 96 * 2
"""Bytes of a row of blocks of the widest weight."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of four layers in FP8."""
    root = tmp_path_factory.mktemp("coded")
    return fp8_copy(make(root, "moe4", dtype="bfloat16"), root / "fp8", block=BLOCK)[0]


def values(directory: Path, change: bool) -> Tensors:
    """What a checkpoint means; with `change`, one element of one weight in each second module is another."""
    with SafetensorsDir(directory) as stored:
        found = {name: stored.read(name) for name in stored.tensors}
    for value in list(found.values())[:: 2 if change else len(found)] if change else ():
        value.view(-1)[value.numel() // 2] += 0.25
    return found


def sent(directory: Path, layout: Layout, hf: Tensors, coder: Coder, bucket_bytes: int) -> Tensors:
    """All ranks' messages, made in one process, and what a receiver puts together from them."""
    spec = ModelSpec.from_hf(directory)
    plan = make_plan(spec, layout, (EngineLayout(),) * 2, bucket_bytes=bucket_bytes, rows=coder.rows)
    check(plan)
    works = [rank_work(plan, rank) for rank in range(layout.world_size)]
    coded = [[coded_message(m, coder) for m in work.sends] for work in works]
    fillers = []
    for rank, work in enumerate(works):
        plain = WeightFiller(work, [dense_header(m.parts) for m in work.sends], parameters(spec, layout, rank, hf))
        fillers.append(CodedFiller(plain, coded[rank], coder))
    letters = in_order(
        [
            [letter_of(w.rank, m, c) for m, c in zip(w.sends, cs, strict=True)]
            for w, cs in zip(works, coded, strict=True)
        ]
    )
    device, assembly, got = torch.device("cpu"), Assembly(), {}
    given = {
        (source, to, turn): data
        for source, filler in enumerate(fillers)
        for turn in range(max(map(len, letters.values())))
        for data, to in filler.gives(turn, device)
    }
    for sender, own in letters.items():
        for turn, letter in enumerate(own):
            message, filler = torch.full((letter.nbytes,), 255, dtype=torch.uint8), fillers[sender]
            filler.begin(turn, letter, message)
            for arrival in filler.arrivals(turn, letter, message):
                arrival.into.copy_(given.pop((arrival.source, sender, turn)))
                filler.end(turn, arrival, message)
            place = {"epoch": 3, "version": 7, "stream": letter.stream, "number": letter.number}
            seal(message, kind="dense", header=filler.header(turn, letter, message), **place)
            opened = open_message(message, **place)
            for name, value in assembly.add(opened.parts, opened.payload):
                assert name not in got, f"{name} comes twice"
                got[name] = value
    assert not given
    assert not assembly.incomplete()
    return got


def parameters(spec: ModelSpec, layout: Layout, rank: int, hf: Tensors) -> Tensors:
    """A rank's Megatron parameters, in float32."""
    found = {}
    for shard in rank_shards(spec, layout, rank):
        local = torch.zeros(shard.shape)
        for block in shard.blocks:
            local[block.local_slices] = block.to_local(hf[block.hf.name][block.hf_slices].float())
        found[shard.entry.name] = local
    return found


def different(found: Tensors, expected: Tensors) -> list[str]:
    """Names of tensors that are not the same in shape, type and bits, or are missing on one side."""
    names = found.keys() | expected.keys()
    return sorted(n for n in names if n not in found or n not in expected or not same_bits(found[n], expected[n]))


@pytest.mark.parametrize("bucket_bytes", [BAND, 9_000, 10**6])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_sent_is_what_a_checkpoint_stores(layout: Layout, bucket_bytes: int, published: Path) -> None:
    """Of weights that nobody trained, the published bytes; of others, those of the encoder for whole tensors."""
    with SafetensorsDir(published) as stored:
        coder = Fp8(CheckpointScales(stored))
        untouched, changed = values(published, False), values(published, True)
        before = load_file(published / "model.safetensors")
        assert not different(sent(published, layout, untouched, coder, bucket_bytes), before)
        expected = {n: v for name, value in changed.items() for n, v in coder.encode(name, value).items()}
        assert len(different(expected, before)) > 20
        assert not different(sent(published, layout, changed, coder, bucket_bytes), expected)


class _OtherScales(Fp8):
    """Each row of scales is that of the block beside."""

    def encode(self, name: str, value: torch.Tensor, first: int = 0) -> Tensors:
        found = super().encode(name, value, first)
        return {n: v.roll(1, -1) if n.endswith(fp8.SCALE_SUFFIX) else v for n, v in found.items()}


def test_the_scale_of_another_block_is_seen(published: Path) -> None:
    """In the bits, and in what the weights mean: far beyond FP8's own rounding, 1/16 of a value."""
    hf = values(published, True)
    with SafetensorsDir(published) as stored:
        right, wrong = (
            sent(published, EP2_PP2, hf, coder(CheckpointScales(stored)), 9_000) for coder in (Fp8, _OtherScales)
        )
    scales = {n for n in right if n.endswith(fp8.SCALE_SUFFIX) and right[n].shape[-1] > 1}
    assert set(different(right, wrong)) == scales
    for scale in scales:
        name = scale.removesuffix(fp8.SCALE_SUFFIX)
        meant = hf[name].float()
        good, bad = (fp8.dequantize(s[name], s[scale], BLOCK).float() - meant for s in (right, wrong))
        assert float((good.abs() - meant.abs() / 16).max()) <= 0.01 * float(bad.abs().max())


JOB = "tests.weights.coded_jobs:send_and_export"


@pytest.mark.parametrize("layout", [EP2_PP2, Layout(tp=2)], ids=str)
def test_real_workers_send_what_they_export(layout: Layout, pool: WorkerPool, published: Path, tmp_path: Path) -> None:
    """Before a step the published bytes, which the converter gives back too; after it, the export of the same."""
    sends = pool.run(JOB, layout=layout, hf_dir=str(published), out=str(tmp_path), bucket_bytes=9_000)
    got: list[Tensors] = [{}, {}]
    assemblies = Assembly(), Assembly()
    for turn, stream, number, nbytes in sorted({s for of_rank in sends for s in of_rank}):
        raw = (tmp_path / f"sent{turn}" / f"s{stream:04d}-{number:06d}.message").read_bytes()
        assert len(raw) == nbytes
        message = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        opened = open_message(message, epoch=3, version=turn, stream=stream, number=number)
        got[turn] |= dict(assemblies[turn].add(opened.parts, opened.payload))
    before = load_file(published / "model.safetensors")
    exported = {n: v for file in (tmp_path / "exported").glob("*.safetensors") for n, v in load_file(file).items()}
    assert not different(got[0], before)
    assert not different(got[1], exported)
    touched = different(exported, before)
    assert any(n.endswith(fp8.SCALE_SUFFIX) for n in touched)
    assert len(touched) < len(before)


def test_a_converted_checkpoint_has_the_same_names_shapes_and_bytes(published: Path, tmp_path: Path) -> None:
    convert.hf_to_megatron(published, tmp_path / "megatron", workers=1)
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "out", form="fp8", workers=1)
    with SafetensorsDir(published) as stored:
        got = sent(published, EP2_PP2, values(published, False), Fp8(CheckpointScales(stored)), 9_000)
    assert not different(got, load_file(tmp_path / "out" / "model.safetensors"))


def test_a_bucket_that_would_cut_blocks_and_values_that_fp8_cannot_hold_are_refused(published: Path) -> None:
    hf = values(published, False)
    name = "model.layers.3.self_attn.o_proj.weight"
    with SafetensorsDir(published) as stored:
        coder = Fp8(CheckpointScales(stored))
        with pytest.raises(UserError, match=r"weights\.bucket_mib is too small: model\.layers\..* quantised in blocks"):
            sent(published, EP2_PP2, hf, coder, BAND // 2)
        hf[name][40, 3] = float("nan")
        with pytest.raises(UserError, match=rf"{name} is nan at \[40, 3\], which FP8 cannot hold"):
            sent(published, EP2_PP2, hf, coder, BAND)


class _Stacks:
    """A coder of stacks of experts, for their ranges alone."""

    rows = 32

    def stored_tensors(self, tensors: Iterable[HfTensor]) -> list[HfTensor]:
        (tensor,) = tensors
        *lead, rows, columns = tensor.shape
        grid = (*lead, -(-rows // 32), -(-columns // 32))
        return [HfTensor(tensor.name, tensor.shape, "float8_e4m3fn"), HfTensor(tensor.name + "_s", grid, "float32")]

    def encode(self, name: str, value: torch.Tensor, first: int = 0) -> Tensors:
        raise NotImplementedError


def test_stacks_are_cut_between_experts_only() -> None:
    codes, scales = coded_parts(Part("x", "bfloat16", (8, 80, 96), ((3, 5, 1), (0, 80, 1), (0, 96, 1)), 0), _Stacks())
    assert codes.ranges == ((3, 5, 1), (0, 80, 1), (0, 96, 1))
    assert (scales.shape, scales.ranges) == ((8, 3, 3), ((3, 5, 1), (0, 3, 1), (0, 3, 1)))
    with pytest.raises(UserError, match=r"weights\.bucket_mib is too small: x \[8, 80, 96\]"):
        coded_parts(Part("x", "bfloat16", (8, 80, 96), ((3, 4, 1), (0, 32, 1), (0, 96, 1)), 0), _Stacks())


def test_changes_and_slices_of_coded_weights_are_refused(published: Path) -> None:
    def side(keep_copies: bool) -> RankSide:
        settings = Settings(
            dtype=torch.bfloat16,
            bucket_bytes=9_000,
            roots_per_stage=0,
            timeout_s=1,
            keep_copies=keep_copies,
            max_fraction=0.5,
            coder=_Stacks(),
        )
        return RankSide(ModelSpec.from_hf(published), Layout(), 0, dict, settings)

    with pytest.raises(ValueError, match="changes of coded weights"):
        side(True)
    answer = side(False).do(MakePlan(mode="direct", engines=(EngineLayout(),)))
    assert answer.problem == "rank 0: weights that are coded go whole to all engines, not in slices"
