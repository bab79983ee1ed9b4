"""SGLang's own model takes FP8 weights as they come in messages: through its loader first, then to their places."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from moe_asyncrl.engine.command import EngineArgs, build_command, child_environment
from moe_asyncrl.models.tiny import make_tiny_model
from tests.checkpoint.formats.quantised import bits, fp8_copy, same_bits


def test_codes_and_scales_get_to_where_a_plain_load_puts_them(tmp_path: Path) -> None:
    """In a fresh process, because the stand-ins for what SGLang imports must be on the path before Python starts."""
    plain = tmp_path / "plain"
    make_tiny_model(plain, "qwen3_moe", 0, dtype="bfloat16")
    for number in (0, 1):
        directory, _ = fp8_copy(plain, tmp_path / f"fp8-{number}", seed=number, activation_scheme="dynamic")
        save_file(load_file(directory / "model.safetensors"), tmp_path / f"{number}.safetensors")
    command = build_command(EngineArgs(model="m", port=1, python=sys.executable), cpu=True)
    program = [sys.executable, "-m", "tests.weights.fp8_loader", str(tmp_path / "fp8-0"), str(tmp_path)]
    done = subprocess.run(
        [*program, str(tmp_path / "out.safetensors")],
        env=child_environment({**os.environ, "PYTHONPATH": os.getcwd()}, command),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = load_file(tmp_path / "out.safetensors")
    names = [name.removeprefix("plain.") for name in out if name.startswith("plain.")]
    assert sum(str(out[f"plain.{name}"].dtype) == "torch.float8_e4m3fn" for name in names) >= 4 * 4
    for name in names:
        assert same_bits(out[f"placed.{name}"], out[f"plain.{name}"]), name
    # Nothing is equal only because nothing moved.
    moved = {n for n in names if not same_bits(out[f"learnt.{n}"], out[f"plain.{n}"])}
    assert {n for n in names if "float8" in str(out[f"plain.{n}"].dtype)} <= moved
    # The experts' scales, one by one, against the file that they came from.
    file = load_file(tmp_path / "1.safetensors")
    for expert in range(4):
        stem = f"model.layers.0.mlp.experts.{expert}."
        for parameter, sources in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
            for kind in ("weight", "weight_scale_inv"):
                found = out[f"placed.model.layers.0.mlp.experts.{parameter}_{kind}"][expert]
                expected = [bits(file[f"{stem}{source}.{kind}"]) for source in sources]
                assert [x for e in expected for x in e.tolist()] == bits(found).tolist()
    assert "through the loader: places:" in done.stdout, done.stdout
