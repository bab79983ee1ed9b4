"""The cluster file: what a site's Slurm and its nodes need, typed as the recipe is. One file a site.

The sentence stands under the field; docs/slurm.md has them all.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from moe_asyncrl.config.recipe import Section

Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._@+:-]+\Z")]
Names = Annotated[str, Meta(min_length=1, max_length=500, pattern=r"^[A-Za-z0-9._@+:|&*,()/\[\]-]+\Z")]
Line = Annotated[str, Meta(min_length=1, max_length=2000, pattern=r"^[^\n\r]+\Z")]
Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]


class Nodes(Section, frozen=True, kw_only=True):
    """Nodes of one kind."""

    nodes: Annotated[int, Meta(ge=1, le=65536)] = 1
    """Number of nodes."""
    gpus_per_node: Annotated[int, Meta(ge=0, le=64)] = 0
    """GPUs taken of each node; 0 runs on CPUs."""
    cpus_per_node: Annotated[int, Meta(ge=1, le=4096)] = 1
    """CPUs taken of each node."""
    memory_gib: Annotated[int, Meta(ge=1, le=65536)] | None = None
    """Memory taken of each node, in GiB; the partition's default if not given."""
    partition: Names | None = None
    """Partition of these nodes, where it differs from the other group's."""
    constraint: Names | None = None
    """Features that these nodes must have, as `sbatch --constraint` reads them."""


class Network(Section, frozen=True, kw_only=True):
    """Network interfaces, by name; the libraries choose where none is named."""

    gloo: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:,-]+\Z")] | None = None
    """GLOO_SOCKET_IFNAME of every role: one interface that every node has."""
    nccl: Annotated[str, Meta(pattern=r"^[=^]?[A-Za-z0-9_.:,-]+\Z")] | None = None
    """NCCL_SOCKET_IFNAME of every role, with NCCL's own `=` and `^` in front if wanted."""


class Container(Section, frozen=True, kw_only=True):
    """The image in which roles run. The supervisor runs outside of it, as it calls Slurm."""

    image: Line
    """Image, as the runtime names it."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """`pyxis`: srun's own `--container-image`; `apptainer`: the command of that name, on every node."""
    mounts: tuple[Line, ...] = ()
    """Folders to mount, as SOURCE or SOURCE:TARGET; the run folder and the folder of the model must be among them."""
    python: Line = "python3"
    """Interpreter inside the image that has this project."""


class Cluster(Section, frozen=True, kw_only=True):
    """A Slurm cluster, and what a run takes of it."""

    trainer: Nodes
    """Nodes of the trainer; the first one also runs supervisor, buffer and rollout."""
    engine: Nodes | None = None
    """Nodes of the engines; not given: they share the trainer's nodes, on other GPUs."""
    partition: Names | None = None
    """Partition; the cluster's default if not given."""
    account: Name | None = None
    """Account to charge."""
    qos: Name | None = None
    """Quality of service."""
    time_limit: Annotated[str, Meta(pattern=r"^(\d+-)?\d{1,2}:[0-5]\d:[0-5]\d\Z")] = "24:00:00"
    """Longest life of a job, as [DAYS-]HH:MM:SS."""
    stop_lead_s: Annotated[int, Meta(ge=10, le=65535)] = 600
    """Seconds before the time limit at which the trainer finishes its step, writes a checkpoint and ends."""
    requeue: bool = False
    """Queue the job again when its time is up, or when Slurm takes its nodes away, and go on from the checkpoint."""
    gres: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]+(:[A-Za-z0-9_.-]+)?\Z")] = "gpu"
    """Slurm's name of the GPUs, with their type if it must be named: `gpu`, `gpu:h100`."""
    network: Network = field(default_factory=Network)
    """Network interfaces."""
    modules: tuple[Names, ...] = ()
    """Environment modules to load before the supervisor starts; the steps inherit what they set."""
    environment: dict[Variable, Line] = field(default_factory=dict)
    """Environment variables of every process of the run, laid over those of the shell that launches."""
    python: Line | None = None
    """Interpreter on the nodes, as a path on the shared file system; the one that launches if not given."""
    container: Container | None = None
    """Image in which roles run."""
    run_folder: Line | None = None
    """Folder of the run folders, on a file system that all nodes share; the recipe's `run.folder` if not given."""
    extra_sbatch: tuple[Annotated[str, Meta(pattern=r"^--[a-z][^\n\r]*\Z")], ...] = ()
    """Further options of the job, such as `--exclusive`, one a line."""
    command_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 30.0
    """Longest wait for an answer of a Slurm command, in seconds."""
