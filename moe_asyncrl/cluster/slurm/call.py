"""Every call of a Slurm command: with a deadline, because a client hangs while the controller is dead."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

from moe_asyncrl.data.errors import UserError

ANSWER_S = 30.0
"""Longest wait for an answer, where the cluster file does not say."""

GONE = "Invalid job id"
"""What Slurm says of a job or step that it does not know, or no longer."""


class SlurmRefused(UserError):
    """Slurm answered, and said no. `said` is its last line."""

    def __init__(self, message: str, said: str) -> None:
        super().__init__(message)
        self.said = said


class SlurmSilent(UserError):
    """No answer: the command is missing, or the controller does not reply."""


def slurm(command: Sequence[str], *, deadline_s: float = ANSWER_S, environment: Mapping[str, str] | None = None) -> str:
    """What the command prints.

    Raises:
        SlurmSilent: it is not installed, or did not answer within `deadline_s` seconds.
        SlurmRefused: it ended with an error.
    """
    name = command[0]
    try:
        ended = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            env=None if environment is None else dict(environment),
            check=False,
        )
    except FileNotFoundError:
        raise SlurmSilent(f"{name}: no such command here; run this on a machine with Slurm's client commands") from None
    except subprocess.TimeoutExpired:
        raise SlurmSilent(
            f"{name} did not answer within {deadline_s:g} s: is Slurm's controller up (scontrol ping)? "
            "The cluster file's command_timeout_s sets the time"
        ) from None
    if ended.returncode != 0:
        said = last_line(ended.stderr) or last_line(ended.stdout) or f"exit code {ended.returncode}"
        if "Unable to contact slurm controller" in said:
            raise SlurmSilent(f"{name}: Slurm's controller cannot be reached (scontrol ping): {said}")
        raise SlurmRefused(f"{name}: {said}", said)
    return ended.stdout


def outside_of_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a job can be submitted, whatever shell or job this is.

    SBATCH_ and SLURM_ variables of the shell would silently win over the script's own lines.
    """
    keep = ("SLURM_CONF", "SLURM_JWT")
    return {k: v for k, v in environment.items() if k in keep or not k.startswith(("SBATCH_", "SLURM_", "SRUN_"))}


def inside_of_job(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for `srun`: what the batch shell inherited must not narrow its steps."""
    drop = ("SLURM_EXPORT_ENV", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    return {k: v for k, v in environment.items() if k not in drop}


def own_environment() -> dict[str, str]:
    """This process's environment, as a value."""
    return dict(os.environ)


def last_line(text: str) -> str:
    """The last line that says something, without the name that Slurm puts in front of errors."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^\w+: (?:error|fatal): ", "", lines[-1]) if lines else ""
