"""Where the roles of a run are started: what the supervisor asks for, and the answer of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from moe_asyncrl.cluster.gpus import Placement, count_usable, place
from moe_asyncrl.cluster.process import start_role
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.engine.ports import free_port
from moe_asyncrl.telemetry.run_folder import RunFolder

NVIDIA_DEVICE = Path("/dev/nvidiactl")


class Role(Protocol):
    """A role that was started: one process, or all ranks of the trainer as one step."""

    @property
    def name(self) -> str:
        """As in the run's logs, for example `engine-1`."""
        ...

    @property
    def node(self) -> str:
        """Where it runs; empty on the supervisor's own machine."""
        ...

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        ...

    @property
    def asked(self) -> bool:
        """It was asked to stop."""
        ...

    @property
    def own_word(self) -> bool:
        """It left a line that says why it failed."""
        ...

    def error(self) -> str:
        """Why it ended, in one line."""
        ...

    def ask_to_stop(self) -> None:
        """SIGTERM to the role itself. Nothing happens if it has ended."""
        ...

    def end(self) -> None:
        """Kill it, if it still runs, and what it left behind."""
        ...


class Launcher(Protocol):
    """Starts the roles of one run. Each call starts them anew and returns at once."""

    def buffer(self) -> Role:
        """The buffer."""
        ...

    def engines(self) -> Sequence[Role]:
        """All engines."""
        ...

    def trainers(self) -> Sequence[Role]:
        """All ranks of the trainer."""
        ...

    def rollouts(self) -> Sequence[Role]:
        """The rollout workers."""
        ...


def world_size(recipe: Recipe) -> int:
    """Ranks of the trainer."""
    t = recipe.trainer
    return t.tp * t.pp * t.cp * t.dp


def engine_count(recipe: Recipe) -> int:
    """Servers that the run starts: none for supervised learning."""
    return recipe.engine.count if recipe.algorithm.objective == "grpo" else 0


def place_here(recipe: Recipe) -> Placement:
    """GPUs of this machine for the roles. Raises `UserError` if it has some, and too few."""
    gpus = count_usable() if NVIDIA_DEVICE.exists() else 0
    return place(
        gpus,
        ranks=world_size(recipe),
        engines=engine_count(recipe),
        tp=recipe.engine.tp,
        colocated=recipe.engine.colocated,
    )


def positions_text(positions: Sequence[int]) -> str | None:
    """`--gpus` of a role; None where nothing is assigned."""
    return ",".join(map(str, positions)) if positions else None


class LocalLauncher:
    """All roles on this machine, as children of the supervisor."""

    def __init__(self, folder: RunFolder, recipe: Recipe) -> None:
        """Raises `UserError` if the machine has too few GPUs."""
        self._folder = folder
        self._recipe = recipe
        self._placement = place_here(recipe)

    def buffer(self) -> Role:
        """The buffer."""
        return start_role(self._folder, "buffer")

    def engines(self) -> Sequence[Role]:
        """All engines."""
        places = self._placement.engines
        return [start_role(self._folder, "engine", i, gpus=positions_text(p)) for i, p in enumerate(places)]

    def trainers(self) -> Sequence[Role]:
        """One process a rank. They meet at a port that is free now."""
        places = self._placement.trainers
        port = free_port()
        return [
            start_role(
                self._folder,
                "trainer",
                rank,
                gpus=positions_text(positions),
                extra_env={
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(len(places)),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": str(self._recipe.trainer.threads),
                },
            )
            for rank, positions in enumerate(places)
        ]

    def rollouts(self) -> Sequence[Role]:
        """One worker."""
        return [start_role(self._folder, "rollout", 0)]
