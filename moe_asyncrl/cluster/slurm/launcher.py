"""Starts the roles of a run as steps of the job in which this process runs."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moe_asyncrl.cluster.launcher import Role
from moe_asyncrl.cluster.process import error_file, last_line, spawn
from moe_asyncrl.cluster.slurm.call import GONE, SlurmRefused, inside_of_job
from moe_asyncrl.cluster.slurm.layout import RunLayout
from moe_asyncrl.cluster.slurm.nodes import Ask
from moe_asyncrl.cluster.slurm.steps import Node, Step, exit_code, first_to_fall, step_command, steps_of
from moe_asyncrl.config.cluster import Cluster
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.engine.ports import free_port
from moe_asyncrl.telemetry.run_folder import RunFolder

log = logging.getLogger(__name__)
END_S = 30.0
"""For srun to end a step that it was told to end."""


@dataclasses.dataclass
class StepRole:
    """A step that was started: the process of its `srun`."""

    step: Step
    process: subprocess.Popen[bytes]
    folder: RunFolder
    said: Path
    """What srun says of it."""
    signal_step: Callable[[str], None]
    """Sends SIGTERM to the tasks of the step of that name. `srun` itself, when it gets one, kills them."""
    asked: bool = False
    """It was asked to stop."""

    @property
    def name(self) -> str:
        """As in the run's logs."""
        return self.step.name

    @property
    def node(self) -> str:
        """Where it runs."""
        return ",".join(node.name for node in self.step.nodes)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return exit_code(self.process.poll())

    @property
    def own_word(self) -> bool:
        """The task that fell first left a line that says why."""
        return error_file(self.folder, self._fallen()[0]).exists()

    def error(self) -> str:
        """Why it ended, in one line."""
        name, how = self._fallen()
        word = error_file(self.folder, name)
        if word.exists():
            text = word.read_text(encoding="utf-8").strip()
            return text if text.startswith(f"{name}:") else f"{name}: {text}"
        return f"{name} {how}"

    def ask_to_stop(self) -> None:
        """SIGTERM to the step's tasks. Nothing happens if it has ended."""
        if self.process.poll() is not None:
            return
        self.asked = True
        try:
            self.signal_step(self.name)
        except UserError as error:
            log.warning("%s cannot be asked to stop, so it is killed: %s", self.name, error)
            self.process.terminate()

    def end(self) -> None:
        """Kill the step, if it still runs. What that leaves ends with the job."""
        if self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_S)

    def _fallen(self) -> tuple[str, str]:
        """The role that fell first, and how it ended."""
        said = self.said.read_text(errors="replace") if self.said.exists() else ""
        fallen = first_to_fall(said)
        if fallen is None:
            return self.name, f"ended with {self.exit_code}: {last_line(self.said) or 'srun said nothing'}"
        name = f"{self.name}-{fallen.task}" if self.step.role == "trainer" else self.name
        path = self.folder.log_path(name)
        if fallen.signalled:
            names = {"Killed": "SIGKILL", "Terminated": "SIGTERM"}
            return name, f"was killed by {names.get(fallen.how, fallen.how)} on {fallen.node}; see {path}"
        last = last_line(path)
        how = fallen.how[0].lower() + fallen.how[1:]
        return name, f"{how} on {fallen.node}; see {path}" + (f" (last line: {last})" if last else "")


class SlurmLauncher:
    """Steps on the nodes of this job."""

    def __init__(
        self,
        folder: RunFolder,
        recipe: Recipe,
        cluster: Cluster,
        layout: RunLayout,
        groups: Sequence[Sequence[Node]],
        *,
        jobs: Sequence[str],
        environment: Mapping[str, str],
        ask: Ask,
    ) -> None:
        """`groups` are the nodes of the layout's groups, `jobs` the job's numbers; `ask` runs Slurm's commands."""
        self._folder = folder
        self._cluster = cluster
        self._het = layout.shape == "het"
        self._steps = steps_of(layout, recipe, groups)
        self._head = groups[0][0]
        self._jobs = list(jobs)
        self._environment = inside_of_job(environment)
        self._ask = ask

    def buffer(self) -> Role:
        """The buffer, on the trainer's first node."""
        return self._start_all("buffer")[0]

    def engines(self) -> Sequence[Role]:
        """A step each."""
        return self._start_all("engine")

    def trainers(self) -> Sequence[Role]:
        """One step with all ranks. They meet on the first node, where this process runs too."""
        meeting = {"MASTER_ADDR": self._head.address, "MASTER_PORT": str(free_port(self._head.address))}
        return self._start_all("trainer", meeting)

    def rollouts(self) -> Sequence[Role]:
        """On the trainer's first node."""
        return self._start_all("rollout")

    def _start_all(self, role: str, extra: Mapping[str, str] | None = None) -> list[Role]:
        return [self._start(step, extra or {}) for step in self._steps if step.role == role]

    def _start(self, step: Step, extra: Mapping[str, str]) -> Role:
        folder = self._folder
        folder.logs.mkdir(parents=True, exist_ok=True)
        said = folder.log_path(f"{step.name}-srun")
        command = step_command(step, self._cluster, run=folder.path, logs=folder.logs, het=self._het)
        threads = {} if step.threads is None else {"OMP_NUM_THREADS": str(step.threads)}
        log.info("step %s: %s", step.name, shlex.join(command))
        said.write_bytes(b"")  # of this step alone: who fell first is read from it
        process = spawn(command, said, {**self._environment, **threads, **extra})
        return StepRole(step, process, folder, said, self._signal_step)

    def _signal_step(self, name: str) -> None:
        listed = self._ask(["squeue", "--steps", "--noheader", "--format=%i|%j", f"--jobs={','.join(self._jobs)}"])
        ids = [line.partition("|")[0].strip() for line in listed.splitlines() if line.partition("|")[2].strip() == name]
        if not ids:
            raise UserError(f"no step of the job is named {name}")
        try:
            self._ask(["scancel", f"--signal={signal.SIGTERM.name.removeprefix('SIG')}", *ids])
        except SlurmRefused as error:
            # A step that ends quickly is gone when scancel asks what became of it.
            if GONE not in error.said:
                raise
