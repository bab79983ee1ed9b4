"""Each patch mends something: its check passes with all patches and fails with that one left out.

A patch acts while a module is imported, so each check needs a process in which Megatron-Core was not imported yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import megatron_patches
from moe_asyncrl.config.capability import Capabilities
from tests.pool.machine import GPU

NAMES = [patch.name for patch in megatron_patches.PATCHES]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    """What became of each check, with and without its patch."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.megatron_patches.forked"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_the_check_passes_with_all_patches(name: str, outcomes: dict[str, dict[str, str]]) -> None:
    assert outcomes[name]["with"] == ""


FAULTS = {
    "unusable_transformer_engine": "no CUDA driver",
    "unusable_apex": "AssertionError",
    "cuda_calls": "not compiled with CUDA",
    "rng_tracker": "not compiled with CUDA",
    "jit_fuser": "AssertionError",
    "optimizer_tensor_types": "torch.cuda.FloatTensor",
    "uneven_collectives": "invalid tensor size",
    "router_gemm": "te_general_gemm",
    "router_padding": "AssertionError",
    "moe_split_sizes": "all_to_all",
    "norm_sequence_parallel": "sequence parallel not supported",
    "torch_adamw_state": "distrib_optimizer.py",
    "checkpoint_writer": "started processes",
    "mla_layer_check": "isinstance",
    "mla_down_projections": "gradients deviate by",
    "packed_rope": "AssertionError",
    "expert_output_bias": "is a view and is being modified inplace",
    "expert_bias_gradient": "AssertionError",
    "expert_bias_share": "AssertionError",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_check_shows_the_fault_without_the_patch(name: str, outcomes: dict[str, dict[str, str]]) -> None:
    assert FAULTS[name] in outcomes[name]["without"]


def test_a_gpu_machine_with_everything_gets_what_no_device_mends() -> None:
    before = list(sys.meta_path)
    assert [patch.name for patch in megatron_patches.active_patches(GPU)] == ["router_padding"]
    assert megatron_patches.apply(GPU, leave_out=["router_padding"]) == ()
    assert sys.meta_path == before


def test_a_gpu_without_transformer_engine_gets_only_the_device_independent_patches() -> None:
    names = {patch.name for patch in megatron_patches.active_patches(Capabilities(cuda=True, nccl=True, gpu_count=1))}
    assert names == {
        "unusable_transformer_engine",
        "unusable_apex",
        "router_gemm",
        "router_padding",
        "norm_sequence_parallel",
        "torch_adamw_state",
        "mla_layer_check",
        "mla_down_projections",
        "packed_rope",
        "expert_output_bias",
        "expert_bias_gradient",
        "expert_bias_share",
    }


def test_every_patch_names_its_versions_and_one_file_of_its_own() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all("megatron-core 0.16.1" in patch.seen_in for patch in megatron_patches.PATCHES)


def test_an_unknown_name_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match="no patch is named nonsense"):
        megatron_patches.active_patches(Capabilities(), leave_out=["nonsense"])


SECOND_CALL = """
import megatron_patches, sys
from moe_asyncrl.config.capability import Capabilities
first = megatron_patches.apply(Capabilities())
hooks = list(sys.meta_path)
assert megatron_patches.apply(Capabilities()) == first and sys.meta_path == hooks
try:
    megatron_patches.apply(Capabilities(transformer_engine=True))
except RuntimeError as error:
    assert "call it once" in str(error)
else:
    raise AssertionError
"""

TOO_LATE = """
import sys, types
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
import megatron_patches
from moe_asyncrl.config.capability import Capabilities
try:
    megatron_patches.apply(Capabilities())
except RuntimeError as error:
    assert "already imported" in str(error)
else:
    raise AssertionError
assert "torch" not in sys.modules, "importing the patches imports PyTorch"
"""


@pytest.mark.parametrize("program", [SECOND_CALL, TOO_LATE], ids=["second call", "too late"])
def test_apply_is_idempotent_and_refuses_to_come_too_late(program: str) -> None:
    # Fresh processes, since the hook is for a process's whole life.
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
