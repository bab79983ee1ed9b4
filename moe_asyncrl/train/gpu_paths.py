"""The trainer's GPU-only paths as small checks, run by `moe_asyncrl.cluster.gpu_check` in a process of their own.

Each compares a GPU path with a reference on the same machine (transformers, the same layers without the path, or torch)
and returns one line with the figure. Tiny random models, no network.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_asyncrl.checkpoint.hf_load import load_hf
from moe_asyncrl.config.capability import Capabilities
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.gpu_reference import save_tiny_model
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.model import build_model, wrap_ddp
from moe_asyncrl.train.parallel import ParallelRuntime

LENGTHS = (48, 17, 31)
EXACT_TOLERANCE = 1e-3
"""Two ways to the same float32 sums."""
TF32_TOLERANCE = 1e-2
"""Transformer Engine multiplies float32 matrices in TF32, with 10 bits of mantissa. A wrong path is off by about 1."""
BFLOAT16_TOLERANCE = 5e-2


class TinyTrainer:
    """One rank with the tiny model loaded through the project's own path from an HF directory."""

    def __init__(self, capabilities: Capabilities, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
        self.spec = ModelSpec.from_hf(folder)
        self.layout = Layout()
        self.folder = folder
        self.dtype = dtype
        self.device = torch.device("cuda" if capabilities.cuda else "cpu")
        self.runtime = ParallelRuntime(capabilities, rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
        self.runtime.setup(self.layout)

    def build(self, capabilities: Capabilities, **overrides: Any) -> Any:
        """The model with the choices that `capabilities` lead to."""
        (chunk,) = build_model(self.spec, self.layout, capabilities, dtype=self.dtype, **overrides)
        chunk.to(self.device)
        load_hf([chunk], self.spec, self.layout, self.folder)
        return chunk

    def prompt(self, length: int, seed: int = 1) -> torch.Tensor:
        """Random token ids, int64 [1, length]."""
        generator = torch.Generator().manual_seed(seed + length)
        return torch.randint(0, self.spec.vocab_size, (1, length), generator=generator).to(self.device)

    def logits(self, model: Any, tokens: torch.Tensor, packed: Any = None) -> torch.Tensor:
        """Logits [1, length, vocabulary] of `tokens` [1, length]; `packed` are Megatron-Core's PackedSeqParams."""
        length = tokens.shape[1]
        positions = torch.arange(length, device=self.device)[None]
        if packed is not None:
            starts = packed.cu_seqlens_q[:-1].long()
            sizes = (packed.cu_seqlens_q[1:] - packed.cu_seqlens_q[:-1]).long()
            positions = positions - torch.repeat_interleave(starts, sizes)[None]
        mask = None
        if packed is None:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=self.device).triu(1)
        out: torch.Tensor = model(tokens, positions, mask, packed_seq_params=packed)
        return out

    def close(self) -> None:
        self.runtime.close()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a-b| / max|b|."""
    return float((a.double().cpu() - b.double().cpu()).abs().max() / b.double().cpu().abs().max())


def within(what: str, found: float, tolerance: float) -> str:
    """The line of evidence. Raises UserError if `found` is above `tolerance`, or no number."""
    if not found <= tolerance:
        raise UserError(f"{what}: difference {found:.2e}, allowed {tolerance:.0e}")
    return f"{what}: difference {found:.1e}, allowed {tolerance:.0e}"


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of the DDP-wrapped or bare model, by parameter name; each must be there and finite, the routers' non-zero."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is None or not bool(torch.isfinite(gradient).all()):
            raise UserError(f"gradient of {name} is missing or not finite")
        if "router" in name and not bool(gradient.any()):
            raise UserError(f"gradient of {name} is zero")
        found[name.removeprefix("module.")] = gradient
    return found


def _backward(trainer: TinyTrainer, model: Any, passes: int = 1) -> None:
    for number in range(passes):
        tokens = trainer.prompt(LENGTHS[0], seed=number)
        logits = trainer.logits(model, tokens)[0, :-1].float()
        torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).backward()  # type: ignore[no-untyped-call]


def te_layers(capabilities: Capabilities) -> str:
    """The layer spec from the capability record, loaded from HF, against transformers; then a backward pass."""
    with tempfile.TemporaryDirectory() as name:
        reference = save_tiny_model(Path(name))
        trainer = TinyTrainer(capabilities, Path(name))
        try:
            model = trainer.build(capabilities, gradient_accumulation_fusion=False)
            tokens = trainer.prompt(LENGTHS[0])
            with torch.no_grad():
                expected = reference.to(trainer.device)(tokens).logits
                found = difference(trainer.logits(model, tokens), expected)
            line = within("logits against transformers, float32", found, TF32_TOLERANCE)
            _backward(trainer, model)
            return f"{line}; {len(_gradients(model))} finite gradients"
        finally:
            trainer.close()


def te_packed(capabilities: Capabilities) -> str:
    """Several sequences packed into one row, bfloat16, against each sequence alone through the same layers."""
    with tempfile.TemporaryDirectory() as name:
        save_tiny_model(Path(name))
        trainer = TinyTrainer(capabilities, Path(name), dtype=torch.bfloat16)
        try:
            from megatron.core.packed_seq_params import PackedSeqParams

            model = trainer.build(capabilities, gradient_accumulation_fusion=False)
            prompts = [trainer.prompt(length) for length in LENGTHS]
            ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(trainer.device, torch.int32)
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=ends,
                cu_seqlens_kv=ends,
                max_seqlen_q=max(LENGTHS),
                max_seqlen_kv=max(LENGTHS),
            )
            with torch.no_grad():
                together = trainer.logits(model, torch.cat(prompts, dim=1), packed)[0]
                alone = torch.cat([trainer.logits(model, prompt)[0] for prompt in prompts])
            return within("packed against alone, bfloat16", difference(together, alone), BFLOAT16_TOLERANCE)
        finally:
            trainer.close()


def compare_builds(capabilities: Capabilities, other: Capabilities, *, passes: int) -> float:
    """Largest difference of logits and gradients of all parameters that both have, after `passes` backward passes.

    Gradients are those in Megatron-Core's main gradient buffers (float32), which only a DDP-wrapped model has.
    """
    with tempfile.TemporaryDirectory() as name:
        save_tiny_model(Path(name))
        trainer = TinyTrainer(capabilities, Path(name))
        try:
            results = []
            for choice in (capabilities, other):
                (model,) = wrap_ddp([trainer.build(choice)])
                with torch.no_grad():
                    logits = trainer.logits(model, trainer.prompt(LENGTHS[1]))
                _backward(trainer, model, passes)
                results.append((logits, _gradients(model)))
            (logits, gradients), (other_logits, other_gradients) = results
            shared = gradients.keys() & other_gradients.keys()
            if not any("router" in name for name in shared) or not any("experts" in name for name in shared):
                raise UserError("the two builds share no router or no expert parameter to compare")
            found = [difference(gradients[name], other_gradients[name]) for name in sorted(shared)]
            return max(difference(logits, other_logits), *found)
        finally:
            trainer.close()


def grouped_gemm(capabilities: Capabilities) -> str:
    """All experts of a rank in one kernel, against one after the other."""
    other = dataclasses.replace(capabilities, grouped_gemm=False)
    return within("logits against sequential experts, float32", _logits_of_both(capabilities, other), TF32_TOLERANCE)


def _logits_of_both(capabilities: Capabilities, other: Capabilities) -> float:
    """The two builds name their expert parameters differently, so their logits and router gradients are compared."""
    with tempfile.TemporaryDirectory() as name:
        save_tiny_model(Path(name))
        trainer = TinyTrainer(capabilities, Path(name))
        try:
            logits, routers = [], []
            for choice in (capabilities, other):
                model = trainer.build(choice, gradient_accumulation_fusion=False)
                with torch.no_grad():
                    logits.append(trainer.logits(model, trainer.prompt(LENGTHS[0])))
                _backward(trainer, model)
                routers.append(torch.cat([g.flatten() for n, g in _gradients(model).items() if "router" in n]))
            return max(difference(*logits), difference(*routers))
        finally:
            trainer.close()


def gradient_accumulation_fusion(capabilities: Capabilities) -> str:
    """Weight gradients added in the kernel, over two passes, against autograd's own sums."""
    other = dataclasses.replace(capabilities, fused_weight_gradient=False)
    found = compare_builds(capabilities, other, passes=2)
    return within("main gradients against unfused, float32", found, EXACT_TOLERANCE)


def compare_adam(fused: Any, device: str) -> float:
    """Largest relative difference of the weights after 5 steps of `fused` and of torch's AdamW."""
    torch.manual_seed(0)
    start = torch.randn(1000, device=device)
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours, reference = start.clone().requires_grad_(), start.clone().requires_grad_()
    optimizers = (fused([ours], **settings), torch.optim.AdamW([reference], **settings))
    for _ in range(5):
        gradient = torch.randn(1000, device=device)
        for weight, optimizer in zip((ours, reference), optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    return difference(ours.detach(), reference.detach())


def fused_adam_te(_capabilities: Capabilities) -> str:
    """Transformer Engine's Adam against torch's."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    return within("weights after 5 steps against torch AdamW", compare_adam(FusedAdam, "cuda"), 1e-5)


def fused_adam_apex(_capabilities: Capabilities) -> str:
    """NVIDIA apex's Adam against torch's."""
    from apex.optimizers import FusedAdam

    return within("weights after 5 steps against torch AdamW", compare_adam(FusedAdam, "cuda"), 1e-5)
