"""The runner of the GPU check: what it decides, how it ends what hangs, and that its comparisons see what is wrong."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from moe_asyncrl.cluster import gpu_check
from moe_asyncrl.cluster.gpu_check import PATHS, GpuPath, Result, describe, exit_code, run_path, why_not
from moe_asyncrl.config.capability import Capabilities
from moe_asyncrl.data.errors import UserError
from tests.pool.machine import GPU

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = replace(GPU, gpu_count=2)


def path_of(function: str) -> GpuPath:
    return GpuPath(name=function, check=f"tests.cluster.paths:{function}", deadline_s=60.0)


def test_all_deadlines_together_keep_the_promise_of_ten_minutes() -> None:
    assert sum(path.deadline_s for path in PATHS) < 600


def test_every_path_runs_where_everything_is_there() -> None:
    assert [why_not(path, EVERYTHING, sglang=True) for path in PATHS] == [None] * len(PATHS)


def test_no_path_runs_without_a_gpu() -> None:
    assert {why_not(path, Capabilities(), sglang=True) for path in PATHS} == {"no CUDA device"}


@pytest.mark.parametrize(
    ("lacking", "stopped"),
    [
        ({"transformer_engine": False}, {"te-layers", "te-packed", "grouped-gemm", "fused-adam-te"}),
        ({"apex": False}, {"fused-adam-apex"}),
        ({"grouped_gemm": False}, {"grouped-gemm"}),
        ({"fused_weight_gradient": False}, {"gradient-accumulation-fusion"}),
        ({"nccl": False}, {"nccl-broadcast", "sglang-update"}),
        ({"gpu_count": 1}, {"sglang-update"}),
    ],
)
def test_a_lack_stops_just_the_paths_that_need_it(lacking: dict[str, int], stopped: set[str]) -> None:
    found = replace(EVERYTHING, **lacking)
    assert {path.name for path in PATHS if why_not(path, found, sglang=True)} == stopped


def test_without_sglang_its_paths_stop() -> None:
    assert {p.name for p in PATHS if why_not(p, EVERYTHING, sglang=False)} == {
        "sglang-serve",
        "sglang-update",
        "sglang-sleep",
    }


def test_the_reason_of_a_lack_is_shown() -> None:
    found = replace(EVERYTHING, apex=False, missing={"apex": "ImportError: no FusedAdam"})
    (path,) = [p for p in PATHS if p.name == "fused-adam-apex"]
    assert why_not(path, found, sglang=True) == "apex: ImportError: no FusedAdam"


def test_every_check_is_a_function_that_exists() -> None:
    import importlib

    for path in PATHS:
        module, _, function = path.check.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), path.check


def test_a_passing_path_shows_its_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = run_path(path_of("passes"))
    assert (result.outcome, result.line) == ("ok", "looked at Capabilities")


def test_a_failing_path_shows_the_reason_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = run_path(path_of("fails"))
    assert result.outcome == "FAILED"
    assert describe(replace(result, seconds=1.2)) == (
        "fails: FAILED (1 s): UserError: logits: difference 1.0e+00, allowed 1e-04"
    )


def test_a_path_that_kills_its_process_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert run_path(path_of("crashes")).outcome == "FAILED"


def test_a_path_that_hangs_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    child_file = tmp_path / "pids"
    monkeypatch.setenv("CHILD_FILE", str(child_file))
    result = run_path(GpuPath(name="hangs", check="tests.cluster.hangs:check", deadline_s=5.0))
    assert (result.outcome, result.line) == ("FAILED", "no result after 5 s")
    pids = [int(pid) for pid in child_file.read_text().split()]
    assert len(pids) == 2
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [(["ok", "ok"], 0), (["ok", "not run"], 3), (["not run", "FAILED", "ok"], 1), (["not run"], 3)],
)
def test_exit_codes(outcomes: list[gpu_check.Outcome], code: int) -> None:
    assert exit_code([Result(path_of("passes"), outcome, "") for outcome in outcomes]) == code


def test_without_a_gpu_each_path_has_its_line() -> None:
    """As a person runs it, in a process of its own. On a machine with a GPU the run itself is the check."""
    if torch.cuda.is_available():
        return
    command = [sys.executable, "-m", "moe_asyncrl.cluster.gpu_check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    lines = result.stdout.splitlines()
    assert result.returncode == 3
    assert lines[:-1] == [f"{path.name}: not run: no CUDA device" for path in PATHS]
    assert lines[-1] == f"gpu-check: 0 ok, 0 failed, {len(PATHS)} not run"


def test_the_document_lists_every_path() -> None:
    import re

    text = (ROOT / "docs" / "gpu.md").read_text()
    assert re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE) == [path.name for path in PATHS]


# The comparisons inside the checks, on the CPU: they accept what is right and see what is wrong.


def test_within_refuses_what_is_off_and_what_is_no_number() -> None:
    from moe_asyncrl.train.gpu_paths import within

    assert within("x", 1e-5, 1e-4) == "x: difference 1.0e-05, allowed 1e-04"
    for wrong in (1e-2, float("nan"), float("inf")):
        with pytest.raises(UserError, match="allowed 1e-04"):
            within("x", wrong, 1e-4)


def test_adam_comparison_sees_another_optimizer() -> None:
    from moe_asyncrl.train.gpu_paths import compare_adam

    def wrong_decay(
        parameters: list[torch.Tensor], *, weight_decay: float, **settings: object
    ) -> torch.optim.Optimizer:
        """Plain Adam: the decay inside the gradient, which is the usual mistake."""
        return torch.optim.Adam(parameters, weight_decay=weight_decay, **settings)  # type: ignore[arg-type]

    assert compare_adam(torch.optim.AdamW, "cpu") == 0.0
    assert compare_adam(wrong_decay, "cpu") > 100 * 1e-5


def test_the_broadcast_check_runs_over_gloo() -> None:
    """Two fresh processes, because the check spawns its own ranks."""
    from moe_asyncrl.weights.gpu_paths import broadcast

    broadcast(2, "gloo", 1 << 20)


def test_broadcast_pattern_has_no_period_that_hides_a_shift() -> None:
    from moe_asyncrl.weights.gpu_paths import pattern

    whole = pattern(1 << 16, torch.device("cpu"))
    for shift in (1, 4, 251, 256, 4096):
        assert not torch.equal(whole[shift:], whole[:-shift])


TRAINER_CHECK = """
import torch
from moe_asyncrl.config.capability import Capabilities
from moe_asyncrl.train import gpu_paths

cpu = Capabilities()
print(gpu_paths.te_layers(cpu))
print(gpu_paths.te_packed(cpu))
print(gpu_paths.compare_builds(cpu, cpu, passes=2))

build = gpu_paths.TinyTrainer.build
def swapped(self, capabilities, **overrides):
    model = build(self, capabilities, **overrides)
    experts = model.decoder.layers[0].mlp.experts.local_experts
    with torch.no_grad():
        first, second = experts[0].linear_fc1.weight, experts[1].linear_fc1.weight
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    return model
gpu_paths.TinyTrainer.build = swapped
try:
    gpu_paths.te_layers(cpu)
except gpu_paths.UserError as error:
    print(error)
"""


def test_trainer_checks_accept_the_local_layers_and_see_swapped_experts() -> None:
    """The same code with the CPU's choices. A fresh process, because it makes and drops its own parallel state."""
    command = [sys.executable, "-c", TRAINER_CHECK]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stderr
    layers, packed, builds, planted = result.stdout.splitlines()[-4:]
    assert layers.startswith("logits against transformers, float32: difference ")
    assert float(layers.split("difference ")[1].split(",")[0]) < 1e-5
    assert packed.startswith("packed against alone, bfloat16: difference ")
    assert float(builds) == 0.0
    assert planted.startswith("logits against transformers, float32: difference ")
    assert float(planted.split("difference ")[1].split(",")[0]) > 100 * 1e-5
