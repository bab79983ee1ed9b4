"""What SGLang's own models keep of a checkpoint, rank by rank: a program that the tests start.

    python -m tests.weights.sglang_loaders CASES.json OUT.npz

A case is a model directory, what becomes of the shared expert, and fields of SGLang's `ServerArgs`. For each rank
SGLang's configuration is published as for that rank, its model is built, and its `load_weights` gets HF tensors whose
elements are numbered from 1. What is then found in the parameters is what that rank keeps: sorted numbers, under
`case/rank`. No process group is made; the model only asks its groups for their sizes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from moe_asyncrl.models.spec import ModelSpec
from tests.weights.plan_cases import numbered

GROUPS = ("pp", "tp", "attn_tp", "moe_ep", "moe_tp")
ABSENT = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}
"""Fields that SGLang reads from the config of MiniMax-M2 and that transformers does not keep."""
ON_CPU = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_tokenizer_init": True,
}


@contextmanager
def published(model: Path, shared_expert: str, fields: dict[str, Any], rank: int) -> Iterator[tuple[Any, Any]]:
    """(class of the model, SGLang's configuration of it), while everything stands as for one rank of a server."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.shared_experts import SharedExpertsConfig
    from sglang.srt.eplb.expert_location import (
        compute_initial_expert_location_metadata,
        set_global_expert_location_metadata,
    )
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.model_loader.utils import get_model_architecture
    from sglang.srt.runtime_context import SpawnRanks, get_model, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    # Stands for the all-to-all backends, whose packages only a GPU machine has.
    os.environ["SGLANG_SHARED_EXPERT_TP1"] = str(int(shared_expert == "replicated"))
    reset_context()
    args = ServerArgs(model_path=str(model), **(ON_CPU | fields))
    publish(args, role="test", ranks=SpawnRanks(world_rank=rank))
    initialize_dp_attention_flags(args)
    initialize_moe_config()
    config = ModelConfig.from_server_args(args)
    for name, value in ABSENT.items():
        if config.hf_config.model_type == "minimax_m2" and not hasattr(config.hf_config, name):
            setattr(config.hf_config, name, value)
    kind, _ = get_model_architecture(config)
    parallel = get_parallel()
    groups = {
        f"{name}_group": SimpleNamespace(
            rank_in_group=getattr(parallel, f"{name}_rank"),
            world_size=getattr(parallel, f"{name}_size"),
            is_first_rank=True,
            is_last_rank=True,
            cpu_group=None,
            device_group=None,
            unique_name=name,
        )
        for name in GROUPS
    }
    with ExitStack() as stack:
        stack.enter_context(parallel.override(**groups))
        shared = SharedExpertsConfig(num_fused_shared_experts=int(shared_expert == "fused"))
        stack.enter_context(get_model().override(shared_experts=shared))
        location = compute_initial_expert_location_metadata(model_config=config, moe_ep_rank=parallel.moe_ep_rank)
        set_global_expert_location_metadata(location, allow_overwrite=True)
        yield kind, config


def kept_by_rank(
    model: Path, shared_expert: str, fields: dict[str, Any], rank: int, weights: dict[str, np.ndarray]
) -> np.ndarray:
    """Numbers that one rank keeps, sorted: int32."""
    with published(model, shared_expert, fields, rank) as (kind, config):
        built = kind(config=config.hf_config)
        for parameter in built.parameters():
            # float32 holds the numbers exactly, and what no loader fills stays 0.
            parameter.data = torch.zeros(parameter.shape, dtype=torch.float32)
        built.load_weights([(name, torch.from_numpy(value).float()) for name, value in weights.items()])
    found = np.unique(np.concatenate([p.detach().numpy().ravel() for p in built.parameters()]))
    return found[found > 0].astype(np.int32)


def main() -> None:
    """All cases, in one process: importing SGLang is the longest part."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    torch.set_default_dtype(torch.float32)
    found: dict[str, np.ndarray] = {}
    for number, (model, shared_expert, fields) in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        weights = numbered(ModelSpec.from_hf(model))
        for rank in range(fields["tp_size"]):
            found[f"{number}/{rank}"] = kept_by_rank(Path(model), shared_expert, fields, rank, weights)
    np.savez(sys.argv[2], **found)


if __name__ == "__main__":
    main()
