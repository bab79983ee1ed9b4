"""`moe-asyncrl status RUN`: how a run stands, on one machine or as a Slurm job. Reads its folder, and asks Slurm."""

from __future__ import annotations

import msgspec

from moe_asyncrl.cluster.owner import Owner, read_owner
from moe_asyncrl.cluster.run_setup import open_run
from moe_asyncrl.cluster.slurm.call import SlurmSilent
from moe_asyncrl.cluster.slurm.files import read_job
from moe_asyncrl.cluster.slurm.look import JobLook, look_at_job
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.live_state import LiveState, read_state
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.summary import Summary


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a run from outside."""

    owner: Owner | None
    """Its supervisor; none before the first."""
    summary: Summary | None
    """What it came to; none while it runs, or if it was killed."""
    state: LiveState | None
    jobs: tuple[JobLook, ...] | None
    """Its Slurm job; none for a run on one machine, empty if Slurm has forgotten the job."""
    silent: str | None = None
    """Why Slurm could not be asked."""

    @property
    def alive(self) -> bool | None:
        """Whether the run goes on, as far as that can be seen from here; None if not."""
        if self.jobs is not None and self.silent is None:
            return any(not job.over for job in self.jobs)
        if self.owner is None:
            return None if self.silent else False
        return self.owner.alive()


def standing(folder: RunFolder) -> Standing:
    """Look at the run."""
    job = read_job(folder)
    jobs: tuple[JobLook, ...] | None = None
    silent = None
    if job is not None:
        try:
            jobs = tuple(look_at_job(job.job, job.command_timeout_s))
        except SlurmSilent as error:
            jobs, silent = (), str(error)
    return Standing(
        owner=read_owner(folder), summary=read_summary(folder), state=read_state(folder), jobs=jobs, silent=silent
    )


def read_summary(folder: RunFolder) -> Summary | None:
    """`summary.json`, if it is there."""
    try:
        return msgspec.json.decode(folder.summary.read_bytes(), type=Summary)
    except (OSError, msgspec.MsgspecError):
        return None


def status_lines(run: str) -> list[str]:
    """What `status` prints. Raises `UserError` for a folder that is no run."""
    folder, recipe = open_run(run)
    now = standing(folder)
    job = read_job(folder)
    lines = [f"run      {folder.path}", f"status   {_status(now)}"]
    if now.jobs is not None and job is not None:
        for look in now.jobs:
            lines.append(f"slurm    {look.words()}")
        if now.silent:
            lines.append(f"slurm    {now.silent}")
        elif not now.jobs:
            lines.append(f"slurm    job {job.job} is over, and Slurm has forgotten it")
    elif now.owner is not None and now.alive:
        lines.append(f"process  supervisor {now.owner.pid} on {now.owner.host}")
    if now.state is not None:
        lines.append(
            f"phase    {now.state.phase}, step {now.state.step} of {recipe.run.steps}, version {now.state.version}"
        )
    if now.owner is not None:
        gone = now.alive is False and now.owner.ended is None
        engines = {e.name: e for e in now.state.engines} if now.state is not None and now.alive else {}
        for role in now.owner.roles:
            state = "gone with its supervisor" if gone and role.state == "running" else role.state
            if engine := engines.get(role.name):
                state += f", {engine.state} version {engine.version} at {engine.url}"
            lines.append(f"  {role.name:<12} {role.node + ' ' if role.node else ''}{state}")
    if now.summary is not None and now.summary.error:
        lines.append(f"error    {now.summary.error}")
    return lines


def _status(now: Standing) -> str:
    if now.jobs and all(job.pending for job in now.jobs):
        return (
            "queued" if now.summary is None else f"queued again; {now.summary.status} after {now.summary.steps} steps"
        )
    if now.summary is not None and not (now.alive and now.owner is not None and now.owner.ended is None):
        return f"{now.summary.status}, {now.summary.steps} steps in {now.summary.seconds:.0f} s"
    if now.alive:
        return "running" if now.owner is not None and now.owner.ended is None else "starting"
    if now.alive is None:
        return "unknown: its supervisor is on another machine"
    if now.owner is None:
        return "never started"
    return "killed: its supervisor ended without a summary; go on from the last checkpoint with run.resume=true"


def open_folder(run: str) -> RunFolder:
    """A run folder. Raises `UserError` if it is none."""
    folder = RunFolder(run)
    if not folder.recipe.is_file():
        raise UserError(f"{run}: not a run folder (no recipe.yaml in it)")
    return folder
