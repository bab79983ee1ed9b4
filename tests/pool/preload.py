"""Imported once in the fork server, so that each worker starts with PyTorch and a patched Megatron-Core in place."""

import os

import torch

import megatron_patches
from tests.pool.machine import CPU

torch.set_num_threads(1)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
megatron_patches.apply(CPU)

import megatron.core.distributed  # noqa: E402
import megatron.core.models.gpt  # noqa: E402
import megatron.core.optimizer  # noqa: E402
import megatron.core.pipeline_parallel  # noqa: E402, F401
