"""The choices that hang on the machine, both ways, as values."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from moe_asyncrl.config import capability
from moe_asyncrl.config.capability import Capabilities, Choices, choose, detect_capabilities
from tests.pool.machine import GPU

ON_GPU = Choices(
    layers="transformer_engine",
    attention="transformer_engine",
    grouped_gemm=True,
    fused_adam="transformer_engine",
    gradient_accumulation_fusion=True,
    process_group_backend="nccl",
)
ON_CPU = Choices(
    layers="local",
    attention="portable",
    grouped_gemm=False,
    fused_adam="torch",
    gradient_accumulation_fusion=False,
    process_group_backend="gloo",
)


def test_a_full_gpu_machine_gets_every_fast_path() -> None:
    assert choose(GPU) == ON_GPU


def test_a_bare_cpu_gets_the_portable_paths() -> None:
    assert choose(Capabilities()) == ON_CPU


def test_packages_without_a_device_change_nothing() -> None:
    assert choose(replace(GPU, cuda=False, gpu_count=0)) == ON_CPU


@pytest.mark.parametrize(
    ("absent", "changed"),
    [
        ({"nccl": False}, {"process_group_backend": "gloo"}),
        ({"grouped_gemm": False}, {"grouped_gemm": False}),
        ({"fused_weight_gradient": False}, {"gradient_accumulation_fusion": False}),
        ({"apex": False}, {}),
        (
            {"transformer_engine": False},
            {"layers": "local", "attention": "portable", "grouped_gemm": False, "fused_adam": "apex"},
        ),
        (
            {"transformer_engine": False, "apex": False},
            {"layers": "local", "attention": "portable", "grouped_gemm": False, "fused_adam": "torch"},
        ),
    ],
)
def test_each_package_decides_only_its_own_choices(absent: dict[str, Any], changed: dict[str, Any]) -> None:
    assert choose(replace(GPU, **absent)) == replace(ON_GPU, **changed)


def machine(**modules: Any) -> Any:
    """A loader for `detect_capabilities`: modules by name with dots as underscores; an exception is raised."""

    def load(name: str) -> Any:
        module = modules.get(name.replace(".", "_"), ModuleNotFoundError(f"No module named {name!r}"))
        if isinstance(module, BaseException):
            raise module
        return module

    return load


TORCH_GPU = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True, device_count=lambda: 4))
NCCL = SimpleNamespace(is_nccl_available=lambda: True)


def test_everything_that_is_there_is_found() -> None:
    found = detect_capabilities(
        machine(
            torch=TORCH_GPU,
            torch_distributed=NCCL,
            transformer_engine_pytorch=SimpleNamespace(GroupedLinear=object),
            apex_optimizers=SimpleNamespace(FusedAdam=object),
            fused_weight_gradient_mlp_cuda=SimpleNamespace(),
        )
    )
    assert found == replace(GPU, gpu_count=4)
    assert not found.missing


@pytest.mark.parametrize("error", [RuntimeError("no driver"), OSError("libcuda"), ValueError("odd"), ImportError()])
def test_an_import_that_raises_anything_counts_as_absent(error: Exception) -> None:
    found = detect_capabilities(machine(torch=TORCH_GPU, torch_distributed=NCCL, transformer_engine_pytorch=error))
    assert not found.transformer_engine
    assert not found.grouped_gemm
    assert type(error).__name__ in found.missing["transformer_engine"]


def test_the_apex_of_the_package_index_is_not_taken_for_nvidias() -> None:
    found = detect_capabilities(machine(torch=TORCH_GPU, torch_distributed=NCCL, apex=SimpleNamespace()))
    assert not found.apex
    assert not detect_capabilities(machine(torch=TORCH_GPU, apex_optimizers=SimpleNamespace())).apex


def test_without_pytorch_nothing_is_there() -> None:
    assert detect_capabilities(machine()) == Capabilities()


def test_detection_here_runs() -> None:
    found = detect_capabilities()
    assert found.cuda == (found.gpu_count > 0)
    assert set(found.missing) <= {field for field in Capabilities.__dataclass_fields__ if field != "missing"}


def test_the_module_does_not_import_pytorch() -> None:
    # A fresh process, since this one has imported it.
    code = f"import sys, {capability.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
