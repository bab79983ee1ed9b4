"""A role as a step of the job: the `srun` command as a value, and what `srun` says when a step ends."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from moe_asyncrl.cluster.gpus import BY_RANK
from moe_asyncrl.cluster.launcher import positions_text
from moe_asyncrl.cluster.slurm.layout import RunLayout
from moe_asyncrl.config.cluster import Cluster
from moe_asyncrl.config.recipe import Recipe

START_S = 120
"""Longest wait of `srun` for a step's resources, which the job has already."""
Kind = Literal["buffer", "engine", "trainer", "rollout"]


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the job."""

    name: str
    address: str
    """Numeric address, as names need not resolve."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step: a role on its nodes."""

    role: Kind
    name: str
    """As in the run's logs; the trainer's step has all ranks."""
    group: int
    nodes: tuple[Node, ...]
    tasks: int = 1
    gres: int = 0
    """GPUs of a node that the step sees: all that the job has there, of which each task takes its own."""
    gpus: str | None = None
    """`role --gpus`."""
    index: int | None = None
    threads: int | None = None
    """OMP_NUM_THREADS of each task."""


def steps_of(layout: RunLayout, recipe: Recipe, groups: Sequence[Sequence[Node]]) -> list[Step]:
    """All steps of a run on the nodes of its groups, in the order in which they start."""
    first = (groups[0][0],)
    gres = [group.gpus_per_node for group in layout.groups]
    engines = [
        Step(
            role="engine",
            name=f"engine-{i}",
            group=place.group,
            nodes=(groups[place.group][place.node],),
            gres=gres[place.group],
            gpus=positions_text(place.gpus),
            index=i,
        )
        for i, place in enumerate(layout.engines)
    ]
    trainer = Step(
        role="trainer",
        name="trainer",
        group=0,
        nodes=tuple(groups[0]),
        tasks=layout.ranks,
        gres=gres[0],
        gpus=BY_RANK if layout.gpus else None,
        threads=recipe.trainer.threads,
    )
    rollouts = [Step(role="rollout", name="rollout-0", group=0, nodes=first, index=0)] if engines else []
    return [Step(role="buffer", name="buffer", group=0, nodes=first), *engines, trainer, *rollouts]


def step_command(step: Step, cluster: Cluster, *, run: Path, logs: Path, het: bool) -> list[str]:
    """The `srun` command of a step. The part behind its options is the role's command, the same as on one machine."""
    per_task = f"{step.name}-%t" if step.role == "trainer" else step.name
    srun = [
        "srun",
        *([f"--het-group={step.group}"] if het else []),
        f"--job-name={step.name}",
        "--export=ALL",  # whatever the shell that launched says of exports
        "--overlap",  # roles share the nodes; each takes its GPUs and threads itself
        f"--immediate={START_S}",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",
        "--mpi=none",
        f"--nodes={len(step.nodes)}",
        f"--nodelist={','.join(node.name for node in step.nodes)}",
        f"--ntasks={step.tasks}",
        f"--ntasks-per-node={step.tasks // len(step.nodes)}",
        "--distribution=block",
        f"--gres={f'{cluster.gres}:{step.gres}' if step.gpus is not None else 'none'}",
        f"--output={logs / per_task}.log",
        "--open-mode=append",
    ]
    return [*srun, *_inside(cluster, run), *role_command(step, run)]


def role_command(step: Step, run: Path) -> list[str]:
    """`moe-asyncrl role …` without its interpreter."""
    command = ["-m", "moe_asyncrl.cli", "role", step.role, "--run", str(run), "--host", step.nodes[0].address]
    if step.index is not None:
        command += ["--index", str(step.index)]
    if step.gpus is not None:
        command += ["--gpus", step.gpus]
    return command


def _inside(cluster: Cluster, run: Path) -> list[str]:
    """Further options of srun and what stands in front of the role: the interpreter, in its image if there is one."""
    box = cluster.container
    if box is None:
        return [cluster.python or sys.executable]
    if box.runtime == "pyxis":
        mounts = [f"--container-mounts={','.join(box.mounts)}"] if box.mounts else []
        return [f"--container-image={box.image}", *mounts, f"--container-workdir={run}", box.python]
    binds = [word for mount in box.mounts for word in ("--bind", mount)]
    return ["apptainer", "exec", "--nv", *binds, "--pwd", str(run), box.image, box.python]


class TaskEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What srun said of one task."""

    task: int
    how: str
    """`Killed`, `Exited with exit code 3`, …"""
    node: str

    @property
    def signalled(self) -> bool:
        """It did not end by itself."""
        return not self.how.startswith("Exited with")


def first_to_fall(said: str) -> TaskEnd | None:
    """The task that brought the step down: of those that ended before srun ended the rest, one killed from outside
    if there is one (the others then fail for want of it), else the first."""
    found: list[TaskEnd] = []
    for line in said.splitlines():
        if "Terminating StepId" in line or "Force Terminated" in line:
            break
        match = re.match(r"srun: error: (\S+): tasks? ([\d,-]+): (.+?)(?: \(core dumped\))?$", line.strip())
        if match:
            task = int(re.split(r"[,-]", match[2])[0])
            found.append(TaskEnd(task=task, how=match[3], node=match[1]))
    return next((end for end in found if end.signalled), found[0] if found else None)


def exit_code(code: int | None) -> int | None:
    """srun's exit code as subprocess would give it: negative for a signal."""
    return code if code is None or code <= 128 else 128 - code
