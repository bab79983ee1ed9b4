"""`moe-asyncrl launch`: look at everything that would be refused later, write the run folder, submit the job."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from moe_asyncrl.cluster.run_setup import absolute, create_run_folder, find_resumable, link, preflight
from moe_asyncrl.cluster.slurm.call import SlurmRefused, outside_of_jobs, slurm
from moe_asyncrl.cluster.slurm.files import SlurmJob, script_file, supervisor_log, write_cluster
from moe_asyncrl.cluster.slurm.layout import RunLayout, lay_out, total_nodes
from moe_asyncrl.cluster.slurm.offer import SINFO, parse_offers, refusal
from moe_asyncrl.cluster.slurm.script import job_script
from moe_asyncrl.cluster.slurm.steps import Node, step_command, steps_of
from moe_asyncrl.cluster.status import standing
from moe_asyncrl.config.cluster import Cluster
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.run_folder import RunFolder, write_atomic

Say = Callable[[str], None]

ADVICE = {
    "Requested node configuration is not available": "no node can give what the run asks for (gpus_per_node, "
    "cpus_per_node, memory_gib, constraint of the cluster file)",
    "Invalid partition name specified": "set partition in the cluster file; sinfo lists them",
    "Invalid account or account/partition combination specified": "set account in the cluster file",
    "Invalid qos specification": "set qos in the cluster file",
    "Requested time limit is invalid (missing or exceeds some limit)": "lower time_limit in the cluster file",
    "Invalid generic resource (gres) specification": "set gres in the cluster file to the name that sinfo -o %G shows",
}


def resolved(recipe: Recipe, cluster: Cluster, base: Path) -> Recipe:
    """The recipe with absolute paths (from `base`), and with the cluster's folder for runs if it names one."""
    if cluster.run_folder is not None:
        recipe = msgspec.structs.replace(recipe, run=msgspec.structs.replace(recipe.run, folder=cluster.run_folder))
    return absolute(recipe, base)


def show(recipe: Recipe, cluster: Cluster, say: Say) -> None:
    """Print the job script and the steps that the job would start. Asks Slurm nothing and writes nothing.

    Raises `UserError` if the nodes do not hold the roles.
    """
    layout = lay_out(recipe, cluster)
    run = Path(recipe.run.folder) / f"{recipe.run.name}-DATE"
    logs = run / "logs"
    say(job_script(layout, cluster, name=recipe.run.name, run=run, log=logs / "supervisor.log").rstrip())
    say("\n# The steps that the job starts. NODE-i stands for a node, ADDRESS-i for its address.")
    for step in steps_of(layout, recipe, _unknown_nodes(layout)):
        command = step_command(step, cluster, run=run, logs=logs, het=layout.shape == "het")
        say(f"# {step.name}\n{shlex.join(command)}")


def submit(recipe: Recipe, cluster: Cluster, environment: Mapping[str, str], say: Say) -> RunFolder:
    """Make the run folder, or take up the one that `run.resume` names, and submit the job.

    Raises:
        UserError: what the recipe says cannot be run, the cluster cannot give what is asked for, or Slurm refused. No
            job and no new run folder is left then.
    """
    layout = lay_out(recipe, cluster)
    outside = outside_of_jobs(environment)
    offers = parse_offers(slurm(SINFO, deadline_s=cluster.command_timeout_s, environment=outside))
    reason = refusal(layout, cluster, offers)
    if reason is not None:
        raise UserError(reason)
    preflight(recipe)
    if recipe.run.resume:
        folder = find_resumable(recipe)
        if standing(folder).alive:
            raise UserError(f"{folder.path}: the run is still at work; see moe-asyncrl status")
        return _record(folder, _sbatch(folder, recipe, cluster, layout, outside), cluster, layout, say)
    base = Path(recipe.run.folder)
    latest = os.readlink(base / "latest") if (base / "latest").is_symlink() else None
    folder = create_run_folder(recipe)
    try:
        job = _sbatch(folder, recipe, cluster, layout, outside)
    except BaseException:
        shutil.rmtree(folder.path)
        if latest is None:
            (base / "latest").unlink(missing_ok=True)
        else:
            link(base, latest)
        raise
    return _record(folder, job, cluster, layout, say)


def _record(folder: RunFolder, job: str, cluster: Cluster, layout: RunLayout, say: Say) -> RunFolder:
    record = SlurmJob(job=job, submitted=time.time(), command_timeout_s=cluster.command_timeout_s)
    folder.write_json(folder.slurm_json, record)
    kind = "a het job" if layout.shape == "het" else "a job"
    say(f"job {job}: {kind} of {total_nodes(layout)} nodes\n{folder.path}")
    return folder


def _sbatch(folder: RunFolder, recipe: Recipe, cluster: Cluster, layout: RunLayout, outside: Mapping[str, str]) -> str:
    log = supervisor_log(folder)
    script = job_script(layout, cluster, name=recipe.run.name, run=folder.path, log=log)
    log.parent.mkdir(parents=True, exist_ok=True)
    write_cluster(folder, cluster)
    write_atomic(script_file(folder), script.encode())
    command = ["sbatch", "--parsable", "--export=ALL", f"--chdir={folder.path}", str(script_file(folder))]
    try:
        said = slurm(command, deadline_s=cluster.command_timeout_s, environment=outside)
    except SlurmRefused as error:
        advice = next((text for key, text in ADVICE.items() if key in error.said), None)
        raise UserError(f"Slurm refuses the job: {error.said}" + (f"; {advice}" if advice else "")) from None
    return said.strip().splitlines()[-1].partition(";")[0]


def _unknown_nodes(layout: RunLayout) -> list[list[Node]]:
    numbers = itertools.count()

    def node() -> Node:
        number = next(numbers)
        return Node(name=f"NODE-{number}", address=f"ADDRESS-{number}")

    return [[node() for _ in range(group.nodes)] for group in layout.groups]
