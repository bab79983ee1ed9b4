"""What this machine can do, found once at start, and the choices that hang on it.

A `Capabilities` record is made once (`detect_capabilities`) and passed to whoever needs it; beside it only the NCCL
versions of trainer and engines are looked up, when an update compares them. The choices are pure functions of the
record, so that tests check both sides anywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LayerImplementation = Literal["local", "transformer_engine"]
AdamSource = Literal["transformer_engine", "apex", "torch"]
ProcessGroupBackend = Literal["nccl", "gloo"]
AttentionImplementation = Literal["portable", "transformer_engine"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What was found. The defaults describe a machine with nothing but a CPU and plain PyTorch."""

    cuda: bool = False
    """PyTorch sees at least one CUDA device."""
    gpu_count: int = 0
    nccl: bool = False
    """torch.distributed was built with NCCL."""
    transformer_engine: bool = False
    apex: bool = False
    """NVIDIA's apex, told by `apex.optimizers.FusedAdam`: the `apex` of the package index is another program."""
    grouped_gemm: bool = False
    """Transformer Engine has a grouped linear layer: all experts of a rank in one kernel."""
    fused_weight_gradient: bool = False
    """apex's extension that adds a weight's gradient straight into the main gradient."""
    missing: Mapping[str, str] = field(default_factory=dict, compare=False)
    """What is absent, with the reason, for display only."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Every choice that hangs on the capabilities, as values."""

    layers: LayerImplementation
    attention: AttentionImplementation
    grouped_gemm: bool
    fused_adam: AdamSource
    gradient_accumulation_fusion: bool
    process_group_backend: ProcessGroupBackend


def choose(capabilities: Capabilities) -> Choices:
    """All choices for one machine."""
    return Choices(
        layers=layer_implementation(capabilities),
        attention=attention_implementation(capabilities),
        grouped_gemm=use_grouped_gemm(capabilities),
        fused_adam=adam_source(capabilities),
        gradient_accumulation_fusion=use_gradient_accumulation_fusion(capabilities),
        process_group_backend=process_group_backend(capabilities),
    )


def layer_implementation(capabilities: Capabilities) -> LayerImplementation:
    """Transformer Engine's layers where it and a GPU are there, else Megatron-Core's own."""
    return "transformer_engine" if capabilities.cuda and capabilities.transformer_engine else "local"


def attention_implementation(capabilities: Capabilities) -> AttentionImplementation:
    """The attention that goes with the layers: ours runs on any device, with any head size, and packed."""
    return "transformer_engine" if layer_implementation(capabilities) == "transformer_engine" else "portable"


def use_grouped_gemm(capabilities: Capabilities) -> bool:
    """All experts of a rank in one kernel. Megatron-Core's kernel for it comes with Transformer Engine."""
    return capabilities.grouped_gemm and layer_implementation(capabilities) == "transformer_engine"


def adam_source(capabilities: Capabilities) -> AdamSource:
    """Where Adam comes from, in the order in which Megatron-Core looks for it."""
    if capabilities.cuda and capabilities.transformer_engine:
        return "transformer_engine"
    if capabilities.cuda and capabilities.apex:
        return "apex"
    return "torch"


def use_gradient_accumulation_fusion(capabilities: Capabilities) -> bool:
    """Add weight gradients straight into the main gradient.

    Needs apex's extension even with Transformer Engine layers, since the output layer stays Megatron-Core's own.
    """
    return capabilities.cuda and capabilities.fused_weight_gradient


def process_group_backend(capabilities: Capabilities) -> ProcessGroupBackend:
    """NCCL where there are a GPU and NCCL, else gloo."""
    return "nccl" if capabilities.cuda and capabilities.nccl else "gloo"


def detect_capabilities(load: Callable[[str], Any] = importlib.import_module) -> Capabilities:
    """Look at this machine. `load` imports a module by its name; an import that raises anything counts as absent.

    Imports PyTorch, and Transformer Engine and apex where they are installed: seconds, so call it once.
    """
    missing: dict[str, str] = {}

    def probe(name: str, check: Callable[[], object]) -> bool:
        try:
            if check():
                return True
            missing[name] = "not available"
        except Exception as error:  # broken installs raise RuntimeError, OSError and worse, not only ImportError
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        return False

    cuda = probe("cuda", lambda: load("torch").cuda.is_available())
    gpu_count = int(load("torch").cuda.device_count()) if cuda else 0
    te = probe("transformer_engine", lambda: load("transformer_engine.pytorch") is not None)
    return Capabilities(
        cuda=cuda,
        gpu_count=gpu_count,
        nccl=probe("nccl", lambda: load("torch.distributed").is_nccl_available()),
        transformer_engine=te,
        apex=probe("apex", lambda: load("apex.optimizers").FusedAdam),
        grouped_gemm=probe("grouped_gemm", lambda: load("transformer_engine.pytorch").GroupedLinear),
        fused_weight_gradient=probe("fused_weight_gradient", lambda: load("fused_weight_gradient_mlp_cuda")),
        missing=missing,
    )
