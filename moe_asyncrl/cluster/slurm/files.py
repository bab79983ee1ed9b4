"""What a launched run keeps of Slurm in its folder: the cluster file, the job script, the job's number."""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml

from moe_asyncrl.config.cluster import Cluster
from moe_asyncrl.config.load import load_cluster
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.run_folder import RunFolder, write_atomic


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `slurm.json`."""

    schema: int = 1
    job: str
    """Slurm's number; of the first component for a het job."""
    submitted: float
    """Unix seconds."""
    command_timeout_s: float
    """Longest wait for an answer of Slurm, as in the cluster file."""


def cluster_file(folder: RunFolder) -> Path:
    """The resolved cluster file of the run."""
    return folder.path / "cluster.yaml"


def script_file(folder: RunFolder) -> Path:
    """The job script."""
    return folder.path / "job.sbatch"


def supervisor_log(folder: RunFolder) -> Path:
    """What the job's own process says."""
    return folder.log_path("supervisor")


def write_cluster(folder: RunFolder, cluster: Cluster) -> None:
    """Keep the cluster file as it was read."""
    text = yaml.safe_dump(msgspec.to_builtins(cluster), sort_keys=False, allow_unicode=True)
    write_atomic(cluster_file(folder), text.encode())


def cluster_of(folder: RunFolder) -> Cluster:
    """The cluster file of a launched run. Raises `UserError` if it is none."""
    if not cluster_file(folder).is_file():
        raise UserError(f"{folder.path}: not a run that was launched (no cluster.yaml in it)")
    return load_cluster(cluster_file(folder))


def read_job(folder: RunFolder) -> SlurmJob | None:
    """The job of a run; None for a run on one machine."""
    try:
        return msgspec.json.decode(folder.slurm_json.read_bytes(), type=SlurmJob)
    except (OSError, msgspec.MsgspecError):
        return None
