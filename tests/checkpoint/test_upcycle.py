"""A dense Llama becomes a Mixtral: the same function up to the noise, the same bytes however it is cut, or one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.checkpoint.safetensors_writer import SafetensorsWriter
from moe_asyncrl.checkpoint.upcycle import upcycle
from moe_asyncrl.checkpoint.upcycle_plan import Upcycling
from moe_asyncrl.cli import main
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.tiny import make_tiny_model
from tests.checkpoint.models import changed_copy, relative, transformers_logits
from tests.checkpoint.parity import CONVERT, TOLERANCE, check_conversion
from tests.pool.pool import WorkerPool

FIELDS: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "vocab_size": 269,
    "rope_theta": 5000.0,
}
MIXTURE = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
PAIRS = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


def llama(path: Path, *, seed: int = 5, tied: bool = True, **changes: Any) -> Path:
    """A small dense model with weights that tell errors."""
    make_tiny_model(path, "llama", seed, init_std=None, tie_embeddings=tied, **{**FIELDS, **changes})
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("upcycle") / "dense")


def in_files_of(source: Path, out: Path, size: int) -> Path:
    """The same checkpoint cut into several files."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source).save_pretrained(out, max_shard_size=size)
    assert len(list(out.glob("*.safetensors"))) > 3
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (out / path.name).write_bytes(path.read_bytes())
    return out


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


# ---- the values


@pytest.mark.parametrize("tied", [True, False])
def test_the_mixture_is_the_dense_model_up_to_the_noise(tied: bool, tmp_path: Path) -> None:
    """With hardly any noise the logits are those of the dense model, whatever the routers say; with more they are not.

    Both logits are transformers': the names of every tensor are right, and weights of experts sum to one.
    """
    expected = transformers_logits(llama(tmp_path / "dense", tied=tied))
    assert expected.std() > 1
    for number, (experts, top_k) in enumerate([(4, 2), (5, 3), (2, 1)]):
        how = Upcycling(experts=experts, top_k=top_k, noise=1e-7)
        spec = upcycle(tmp_path / "dense", tmp_path / f"quiet-{number}", how)
        assert (spec.num_experts, spec.experts_per_token, spec.tie_embeddings) == (experts, top_k, False)
        assert relative(transformers_logits(tmp_path / f"quiet-{number}"), expected) < 1e-5
    upcycle(tmp_path / "dense", tmp_path / "noisy")
    assert 1e-3 < relative(transformers_logits(tmp_path / "noisy"), expected) < 0.3


def test_noise_has_its_size_and_no_two_draws_are_alike(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "out", Upcycling(experts=3, noise=0.02))
    before, after = tensors(dense), tensors(tmp_path / "out")
    draws = []
    for layer in range(4):
        for theirs, ours in PAIRS:
            whole = before[f"model.layers.{layer}.mlp.{theirs}.weight"]
            for expert in range(3):
                noise = (after[MIXTURE.format(layer, expert, ours)] - whole) / whole.std()
                assert abs(float(noise.std()) / 0.02 - 1) < 0.03 and abs(float(noise.mean())) < 0.001
                draws.append(noise.flatten()[:5000])
        router = after[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
        norm = before[f"model.layers.{layer}.post_attention_layernorm.weight"]
        assert router.shape == (3, 96)
        assert abs(float(router.std() * norm.square().sum().sqrt()) - 1) < 0.15
    correlation = np.corrcoef(torch.stack(draws).numpy())
    assert np.abs(correlation - np.eye(len(draws))).max() < 0.08
    kept = [name for name in before if ".mlp." not in name]
    assert len(kept) == 4 * 6 + 2 and all(torch.equal(before[name], after[name]) for name in kept)
    assert torch.equal(after["lm_head.weight"], before["model.embed_tokens.weight"])


def test_types_are_kept(tmp_path: Path) -> None:
    """A bfloat16 model stays one, and a tensor in a type of its own keeps it. Experts still differ after rounding."""
    llama(tmp_path / "dense", dtype="bfloat16")
    found = load_file(tmp_path / "dense" / "model.safetensors")
    found["model.norm.weight"] = found["model.norm.weight"].float()
    save_file(found, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    spec = upcycle(tmp_path / "dense", tmp_path / "out")
    after = tensors(tmp_path / "out")
    assert spec.torch_dtype == "bfloat16"
    assert {name for name, value in after.items() if value.dtype != torch.bfloat16} == {"model.norm.weight"}
    a, b = (after[MIXTURE.format(2, expert, "w2")] for expert in (0, 1))
    assert (a != b).float().mean() > 0.5


# ---- the bytes


def test_same_bytes_however_either_side_is_cut(dense: Path, tmp_path: Path) -> None:
    cut = in_files_of(dense, tmp_path / "cut", 150_000)
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        upcycle(cut, tmp_path / "a")
    finally:
        torch.set_num_threads(threads)
    upcycle(dense, tmp_path / "b")
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "b").iterdir()} == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    upcycle(dense, tmp_path / "c", max_shard_bytes=200_000)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) > 3
    one, many = tensors(tmp_path / "b"), tensors(tmp_path / "c")
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)
    upcycle(dense, tmp_path / "d", Upcycling(seed=1))
    other = tensors(tmp_path / "d")
    changed = {name for name in one if not torch.equal(one[name], other[name])}
    assert changed == {name for name in one if ".block_sparse_moe." in name}


def test_each_tensor_is_read_once_and_one_expert_is_held(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of reads and writes: every expert is written before the next is made."""
    events: list[str] = []
    read, write = SafetensorsDir.read, SafetensorsWriter.write

    def reading(self: SafetensorsDir, name: str, *slices: Any) -> torch.Tensor:
        events.append(name)
        return read(self, name, *slices)

    def writing(self: SafetensorsWriter, name: str, value: torch.Tensor) -> None:
        events.append("write")
        write(self, name, value)

    monkeypatch.setattr(SafetensorsDir, "read", reading)
    monkeypatch.setattr(SafetensorsWriter, "write", writing)
    upcycle(dense, tmp_path / "out")
    reads = [name for name in events if name != "write"]
    assert sorted(reads) == sorted(tensors(dense))
    gate = events.index("model.layers.1.mlp.gate_proj.weight")
    assert events[gate + 1 : gate + 5] == ["write"] * 4 and events[gate + 5] != "write"


# ---- Megatron


@pytest.fixture(scope="module")
def mixture(dense: Path) -> tuple[Path, np.ndarray[Any, Any]]:
    out = dense.parent / "mixture"
    upcycle(dense, out)
    return out, transformers_logits(out)


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(dp=2, ep=2, pp=2), Layout(tp=2)], ids=str)
def test_megatron_computes_the_same_and_exports_its_bytes(
    layout: Layout, mixture: tuple[Path, np.ndarray[Any, Any]], pool: WorkerPool, tmp_path: Path
) -> None:
    check_conversion(pool, layout, *mixture, tmp_path / "out")


def swap(a: str, b: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(found: dict[str, torch.Tensor]) -> None:
        found[a], found[b] = found[b], found[a]

    return change


@pytest.mark.parametrize(
    "plant",
    [
        *(swap(MIXTURE.format(1, 0, which), MIXTURE.format(1, 1, which)) for which in ("w1", "w2", "w3")),
        swap(MIXTURE.format(1, 0, "w2"), MIXTURE.format(2, 0, "w2")),
        swap(MIXTURE.format(1, 2, "w1"), MIXTURE.format(1, 2, "w3")),
    ],
    ids=["w1", "w2", "w3", "layers", "gate-and-up"],
)
def test_the_noise_shows_a_wrong_expert(
    plant: Callable[[dict[str, torch.Tensor]], None],
    mixture: tuple[Path, np.ndarray[Any, Any]],
    pool: WorkerPool,
    tmp_path: Path,
) -> None:
    """One matrix of two near-equal experts exchanged: far above what two correct programs differ by."""
    directory, expected = mixture
    (right,) = pool.run(CONVERT, layout=Layout(), hf_dir=str(directory))
    assert relative(right, expected) < TOLERANCE / 10
    planted = changed_copy(directory, tmp_path / "planted", plant)
    (wrong,) = pool.run(CONVERT, layout=Layout(), hf_dir=str(planted))
    assert relative(wrong, expected) > 10 * TOLERANCE


# ---- what cannot be, and what breaks off


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "`attention_bias` is true"),
        ({"mlp_bias": True}, "`mlp_bias` is true"),
        ({"head_dim": 10}, "`head_dim` 10 times 12 heads is not `hidden_size` 96"),
        ({"rope_theta": 5000.5}, "`rope_theta` 5000.5 is no whole number"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 2048,
                }
            },
            "`rope_scaling` is set",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "`rope_scaling` asks for 'linear'"),
        ({"architectures": ["MixtralForCausalLM"]}, "`architectures` names MixtralForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq"}}, "`quantization_config`"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_mixtral_has_not_is_named(
    changes: dict[str, Any], message: str, dense: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in dense.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    if changes.get("architectures"):
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    (source / "config.json").write_text(json.dumps({**config, **changes}))
    assert main(["upcycle", str(source), str(tmp_path / "out")]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and "config.json: " + message in err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--experts", "1"], "--experts 1: a mixture has at least 2"),
        (["--top-k", "5"], "--top-k 5 is not between 1 and the 4 experts"),
        (["--noise", "0"], "--noise 0.0 is not above 0"),
        (["--noise", "0.5"], "--noise 0.5 is not above 0 and at most 0.1"),
        (["--seed", "-1"], "--seed -1 is negative"),
    ],
)
def test_options_out_of_bounds(
    options: list[str], message: str, dense: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["upcycle", str(dense), str(tmp_path / "out"), *options]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and message in err and not (tmp_path / "out").exists()


def test_the_command(dense: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Options reach the mixture; the directory has to be a new one."""
    out = tmp_path / "deep" / "mixture"
    words = ["upcycle", str(dense), str(out), "--experts", "3", "--top-k", "1", "--noise", "0.01", "--seed", "7"]
    assert main(words) == 0
    assert capfd.readouterr().out == f"{out}\n"
    upcycle(dense, tmp_path / "same", Upcycling(experts=3, top_k=1, noise=0.01, seed=7))
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "same" / "model.safetensors").read_bytes()
    assert main(words) == 2
    assert "exists and is not an empty directory" in capfd.readouterr().err
    (tmp_path / "file").touch()
    assert main(["upcycle", str(dense), str(tmp_path / "file" / "mixture")]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "mixture cannot be made: " in err


def test_damaged_sources(dense: Path, tmp_path: Path) -> None:
    def spoil(found: dict[str, torch.Tensor]) -> None:
        found["model.layers.2.mlp.up_proj.weight"][:] = 0.25

    with pytest.raises(UserError, match=r"layers\.2\.mlp\.up_proj\.weight has a standard deviation of 0"):
        upcycle(changed_copy(dense, tmp_path / "flat", spoil), tmp_path / "out")

    def silence(found: dict[str, torch.Tensor]) -> None:
        found["model.layers.3.post_attention_layernorm.weight"][:] = 0

    with pytest.raises(UserError, match=r"layers\.3\.block_sparse_moe\.gate\.weight: the norm before it"):
        upcycle(changed_copy(dense, tmp_path / "silent", silence), tmp_path / "out")

    def shorten(found: dict[str, torch.Tensor]) -> None:
        del found["model.norm.weight"]

    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        upcycle(changed_copy(dense, tmp_path / "short", shorten), tmp_path / "out")
    tied = changed_copy(
        dense, tmp_path / "tied", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    )
    with pytest.raises(UserError, match=r"ties the output layer.*lm_head\.weight differs"):
        upcycle(tied, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flat", "short", "silent", "tied"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "ctrl-c"])
def test_nothing_half_done_is_left(
    error: BaseException, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    write = SafetensorsWriter.write

    def failing(self: SafetensorsWriter, name: str, value: torch.Tensor) -> None:
        calls.append(name)
        if len(calls) == 9:
            raise error
        write(self, name, value)

    monkeypatch.setattr(SafetensorsWriter, "write", failing)
    expected = UserError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        upcycle(dense, tmp_path / "out")
    if expected is UserError:
        assert str(caught.value) == f"{tmp_path / 'out'} cannot be written: No space left on device"
    assert list(tmp_path.iterdir()) == []
