"""`moe-asyncrl supervise RUN`: the job's own process. It gives the supervisor the job's nodes, and ends the job."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial

import msgspec

from moe_asyncrl.cluster.run_setup import open_run
from moe_asyncrl.cluster.slurm.call import SlurmRefused, SlurmSilent, slurm
from moe_asyncrl.cluster.slurm.files import cluster_of
from moe_asyncrl.cluster.slurm.launcher import SlurmLauncher
from moe_asyncrl.cluster.slurm.layout import lay_out
from moe_asyncrl.cluster.slurm.nodes import allocated, component_ids
from moe_asyncrl.cluster.supervisor import Supervisor
from moe_asyncrl.config.cluster import Cluster
from moe_asyncrl.config.load import dump_recipe
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.run_folder import RunFolder, write_atomic
from moe_asyncrl.telemetry.summary import Summary


def supervise(run: str, environment: Mapping[str, str]) -> Summary:
    """Run the launched run in this job, from its newest checkpoint if it has one.

    How often the job was started before is never asked: a start may have been lost on a dead node without a trace.
    Raises `UserError`, also written into the summary, for a job that does not fit the run.
    """
    folder, recipe = open_run(run)
    cluster = cluster_of(folder)
    try:
        supervisor = _supervisor(folder, recipe, cluster, environment)
        summary = supervisor.run()
    except UserError as error:
        folder.write_json(folder.summary, Summary(status="failed", error=str(error)))
        raise
    if supervisor.time_is_up and summary.status == "stopped" and cluster.requeue:
        _requeue(environment["SLURM_JOB_ID"], cluster)
    return summary


def _supervisor(folder: RunFolder, recipe: Recipe, cluster: Cluster, environment: Mapping[str, str]) -> Supervisor:
    ask = partial(slurm, deadline_s=cluster.command_timeout_s)
    layout = lay_out(recipe, cluster)
    groups = allocated(layout, environment, ask)
    recipe = resumed(folder, recipe)
    jobs = component_ids(environment)
    launcher = SlurmLauncher(folder, recipe, cluster, layout, groups, jobs=jobs, environment=environment, ask=ask)
    return Supervisor(folder, recipe, launcher=launcher, job=jobs[0])


def resumed(folder: RunFolder, recipe: Recipe) -> Recipe:
    """The recipe that goes on, if an earlier start of the job left a checkpoint. Written for the roles to read."""
    if recipe.run.resume or not any(folder.checkpoints.glob("step-*")):
        return recipe
    recipe = msgspec.structs.replace(recipe, run=msgspec.structs.replace(recipe.run, resume=True))
    write_atomic(folder.recipe, dump_recipe(recipe).encode())
    return recipe


def _requeue(job: str, cluster: Cluster) -> None:
    """Queue the job again. Slurm ends this process."""
    print(f"job {job} is queued again and goes on from the checkpoint", flush=True)
    try:
        slurm(["scontrol", "requeue", job], deadline_s=cluster.command_timeout_s)
    except (SlurmRefused, SlurmSilent) as error:
        print(f"moe-asyncrl: the job could not be queued again: {error}", file=sys.stderr)
