"""The machine that the test workers stand for, a CPU wherever the tests run, and one that has everything."""

from moe_asyncrl.config.capability import Capabilities

CPU = Capabilities()
GPU = Capabilities(
    cuda=True,
    gpu_count=8,
    nccl=True,
    transformer_engine=True,
    apex=True,
    grouped_gemm=True,
    fused_weight_gradient=True,
)
"""A machine that has everything. For choices as values: nothing runs on it."""
