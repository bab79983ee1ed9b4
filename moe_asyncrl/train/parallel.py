"""The trainer's process groups: torch.distributed and Megatron-Core's parallel state for a layout, made and remade."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

import megatron_patches
from moe_asyncrl.config.capability import Capabilities, process_group_backend
from moe_asyncrl.data.errors import DeadlineExceeded, UserError
from moe_asyncrl.models.layout import Layout


class ParallelRuntime:
    """One rank's process groups. `setup` may be called again with another layout in the same living processes.

    All ranks must make the same calls in the same order.
    """

    def __init__(
        self, capabilities: Capabilities, *, rank: int, world_size: int, store: Store, timeout_s: float = 120.0
    ) -> None:
        """`store` is shared by all ranks; `timeout_s` bounds the forming of groups and every collective on them.

        Patches Megatron-Core, so it must come before the first import of it.
        """
        megatron_patches.apply(capabilities)
        self.capabilities = capabilities
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.layout: Layout | None = None
        self._store = store
        self._generation = 0

    @classmethod
    def from_environment(
        cls, capabilities: Capabilities, environment: Mapping[str, str], *, timeout_s: float = 120.0
    ) -> ParallelRuntime:
        """Meet the other ranks as torchrun and Slurm scripts describe them: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

        Raises:
            UserError: a variable is missing or malformed.
            DeadlineExceeded: the others did not come within `timeout_s`.
        """
        try:
            rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        except KeyError as error:
            raise UserError(f"trainer: the environment variable {error.args[0]} is not set") from None
        except ValueError as error:
            raise UserError(f"trainer: RANK, WORLD_SIZE and MASTER_PORT must be numbers ({error})") from None
        try:
            store = TCPStore(host, port, world_size, rank == 0, timedelta(seconds=timeout_s))
        except (RuntimeError, dist.DistError) as error:
            raise DeadlineExceeded(
                f"trainer rank {rank}: {world_size} ranks did not meet at {host}:{port} in {timeout_s:g} s ({error})"
            ) from error
        return cls(capabilities, rank=rank, world_size=world_size, store=store, timeout_s=timeout_s)

    def setup(self, layout: Layout, *, seed: int = 1234) -> None:
        """Form the groups of `layout` and seed the generators. Groups of another layout are destroyed first.

        The same layout again only seeds anew.

        Raises:
            UserError: the layout needs another number of ranks.
            DeadlineExceeded: the groups were not formed within the time limit.
        """
        if layout.world_size != self.world_size:
            raise UserError(f"layout {layout} needs {layout.world_size} ranks, there are {self.world_size}")
        if layout != self.layout:
            self.close()
            self._generation += 1
            try:
                self._form(layout)
            except (RuntimeError, dist.DistError) as error:
                self.close()
                raise DeadlineExceeded(
                    f"trainer rank {self.rank}: the process groups of layout {layout} were not formed "
                    f"within {self.timeout_s:g} s ({error})"
                ) from error
            self.layout = layout
        seed_everything(seed)

    def _form(self, layout: Layout) -> None:
        from megatron.core import parallel_state

        backend = process_group_backend(self.capabilities)
        if backend == "nccl":
            torch.cuda.set_device(self.rank % self.capabilities.gpu_count)
        # A prefix of its own for each generation: a store never forgets the keys of earlier groups.
        store = PrefixStore(f"groups-{self._generation}", self._store)
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.timeout_s),
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=self.timeout_s / 60,
        )

    def barrier(self) -> None:
        """Wait for all ranks, at most the time limit.

        Raises:
            DeadlineExceeded: some rank did not come.
        """
        try:
            dist.barrier()
        except (RuntimeError, dist.DistError) as error:
            raise DeadlineExceeded(
                f"trainer rank {self.rank}: not all {self.world_size} ranks reached the barrier "
                f"within {self.timeout_s:g} s ({error})"
            ) from error

    def close(self) -> None:
        """Destroy all groups. Nothing happens if there are none."""
        from megatron.core import parallel_state

        self.layout = None
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed PyTorch and Megatron-Core's generators; tensor- and expert-parallel ranks get different streams of it."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def parallel_coordinates() -> dict[str, Any]:
    """This rank's coordinates as Megatron-Core sees them, by the names of `RankCoordinates`."""
    from megatron.core import parallel_state as state

    return {
        "tp": state.get_tensor_model_parallel_rank(),
        "cp": state.get_context_parallel_rank(),
        "dp": state.get_data_parallel_rank(),
        "pp": state.get_pipeline_model_parallel_rank(),
        "etp": state.get_expert_tensor_parallel_rank(),
        "ep": state.get_expert_model_parallel_rank(),
        "edp": state.get_expert_data_parallel_rank(),
    }
