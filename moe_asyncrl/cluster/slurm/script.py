"""The job script: a template of `launch/`, filled in. Pure but for reading the template."""

from __future__ import annotations

import re
import shlex
import string
import sys
from pathlib import Path

from moe_asyncrl.cluster.slurm.layout import RunLayout
from moe_asyncrl.cluster.supervisor import TIME_IS_UP
from moe_asyncrl.config.cluster import Cluster, Nodes
from moe_asyncrl.data.errors import UserError


def template(name: str) -> string.Template:
    """A template of `launch/`. Raises `UserError` if the project was installed without them."""
    path = Path(__file__).resolve().parents[3] / "launch" / name
    if not path.is_file():
        raise UserError(f"{path}: template not found; launch from a clone of the project installed with pip install -e")
    return string.Template(path.read_text(encoding="utf-8"))


def job_script(layout: RunLayout, cluster: Cluster, *, name: str, run: Path, log: Path) -> str:
    """What is given to `sbatch`. Raises `UserError` for a folder whose name Slurm would read as something else."""
    for path in (run, log):
        if re.search(r"[\s%\\\"']", str(path)):
            raise UserError(f"run folder {path}: Slurm cannot write to a name with blanks, quotes, % or \\ in it")
    values = {
        "name": name,
        "run": shlex.quote(str(run)),
        "log": str(log),
        "time_limit": cluster.time_limit,
        "signal": TIME_IS_UP.name.removeprefix("SIG"),
        "lead": str(cluster.stop_lead_s),
        "requeue": "requeue" if cluster.requeue else "no-requeue",
        "modules": "\n".join(f"module load {shlex.quote(m)}" for m in cluster.modules),
        "environment": "\n".join(f"export {k}={shlex.quote(v)}" for k, v in variables(cluster).items()),
        "python": shlex.quote(cluster.python or sys.executable),
    }
    if layout.shape == "het":
        values["nodes"], values["engine_nodes"] = (node_lines(group, cluster) for group in layout.groups)
        text = template("het_job.sbatch").substitute(values)
    else:
        values["nodes"] = node_lines(layout.groups[0], cluster, nodes=sum(g.nodes for g in layout.groups))
        text = template("job.sbatch").substitute(values)
    return re.sub(r"\n{3,}", "\n\n", text)


def node_lines(group: Nodes, cluster: Cluster, *, nodes: int | None = None) -> str:
    """`#SBATCH` lines that ask for a group of nodes."""
    wanted: list[tuple[str, object]] = [
        ("partition", group.partition or cluster.partition),
        ("account", cluster.account),
        ("qos", cluster.qos),
        ("constraint", group.constraint),
        ("nodes", group.nodes if nodes is None else nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", group.cpus_per_node),
        ("gres", f"{cluster.gres}:{group.gpus_per_node}" if group.gpus_per_node else None),
        ("mem", None if group.memory_gib is None else f"{group.memory_gib}G"),
    ]
    lines = [f"#SBATCH --{option}={value}" for option, value in wanted if value is not None]
    return "\n".join([*lines, *(f"#SBATCH {line}" for line in cluster.extra_sbatch)])


def variables(cluster: Cluster) -> dict[str, str]:
    """Environment variables that the cluster file sets, the interfaces among them."""
    interfaces = {"GLOO_SOCKET_IFNAME": cluster.network.gloo, "NCCL_SOCKET_IFNAME": cluster.network.nccl}
    return {**{k: v for k, v in interfaces.items() if v is not None}, **cluster.environment}
