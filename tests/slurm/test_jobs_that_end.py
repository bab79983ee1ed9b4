"""One supervised run over two nodes, ended in every way, and begun again each time by the same job script.

taken over ─▶ a rank is killed ─▶ its time is up ─▶ queued again by itself, goes on ─▶ stopped
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_asyncrl.cluster.owner import Ownership
from moe_asyncrl.telemetry.run_folder import RunFolder
from tests.slurm.fixture import Cluster
from tests.slurm.runs import Run, command, none_left, story, write_cluster

SUPERVISED = ("algorithm.objective=sft", "run.steps=100000", "checkpoint.every=0")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the user."""
    return tmp_path_factory.mktemp("ended")


@pytest.fixture(scope="module")
def run(slurm: Cluster, home: Path) -> Iterator[Run]:
    """Launched, and not waited for."""
    site = write_cluster(home / "site.yaml", trainer={"nodes": 2, "cpus_per_node": 4}, requeue=True)
    said = command(slurm, home, "launch", "demo", "--cluster", str(site), *SUPERVISED)
    assert said.code == 0 and said.err == "", said
    yield Run((home / "runs" / "latest").resolve())


def job(run: Run) -> str:
    """The job's number."""
    return str(run.json("slurm.json")["job"])


def words(slurm: Cluster, run: Run) -> str:
    """What `status` says."""
    return command(slurm, run.folder, "status", str(run.folder)).out


def again(run: Run, slurm: Cluster) -> None:
    """Submit the run's job script once more, as a person may who wants to go on."""
    number = slurm.ask("sbatch", "--parsable", str(run.folder / "job.sbatch")).strip()
    RunFolder(run.folder).write_json(run.folder / "slurm.json", {**run.json("slurm.json"), "job": number})


def test_an_older_supervisor_gives_way_and_writes_nothing(run: Run, slurm: Cluster, home: Path) -> None:
    """As after a lost node whose copy of the job still lives: the file names another owner."""
    run.until("its roles are started", lambda: len((run.json("supervisor.json") or {"roles": ()})["roles"]) == 2)
    newer = Ownership.claim(RunFolder(run.folder), job="another", grace_s=0.0)
    none_left(home, slurm)
    assert not newer.lost(look_now=True) and run.json("summary.json") is None
    assert "another supervisor has taken over this run" in (run.folder / "logs" / "supervisor.log").read_text()
    newer.release()


def test_a_killed_rank_ends_the_job_with_its_error(run: Run, slurm: Cluster, home: Path) -> None:
    again(run, slurm)
    run.until("rank 1 is there", lambda: run.rank(1))
    run.kill_rank(1)
    none_left(home, slurm)
    said = command(slurm, home, "status", "runs/latest")
    error = f"trainer-1 was killed by SIGKILL on node2; see {run.folder / 'logs' / 'trainer-1.log'}"
    for line in (
        f"slurm    job {job(run)} ended with an error",
        f"error    {error}",
        f"  trainer      node1,node2 {error}",
    ):
        assert line in said.out.splitlines(), f"{said}\n{story(run.folder)}"
    assert "status   failed, 0 steps in " in said.out and run.json("summary.json")["error"] == error
    assert "  buffer       node1 ended" in said.out.splitlines()


def test_before_its_time_is_up_it_writes_a_checkpoint_and_is_queued_again(run: Run, slurm: Cluster) -> None:
    again(run, slurm)
    run.until("step 2", lambda: run.steps()[-1:] >= [2])
    # What `#SBATCH --signal` makes Slurm send.
    slurm.ask("scancel", "--batch", "--signal=USR2", job(run))
    log = run.folder / "logs" / "supervisor.log"
    run.until("it is queued again", lambda: "is queued again and goes on from the checkpoint" in log.read_text())
    assert run.json("summary.json")["status"] == "stopped"
    done = run.steps()[-1]
    assert run.checkpoint() == done
    run.until("status says so", lambda: f"queued again; stopped after {done} steps" in words(slurm, run))
    run.until("it goes on", lambda: len(run.steps()) > done)
    assert run.steps()[: done + 1] == list(range(1, done + 2)), story(run.folder)
    assert any(line.startswith(f"{job(run)} RUNNING") for line in slurm.jobs())


def test_stop_writes_a_checkpoint_and_ends_the_job(run: Run, slurm: Cluster, home: Path) -> None:
    said = command(slurm, home, "stop", "runs/latest")
    assert said.code == 0 and said.err == "", said
    lines = said.out.splitlines()
    assert lines[0] == "asked to stop: the trainer finishes its step and writes a checkpoint"
    assert lines[1].startswith("stopped: ")
    assert run.checkpoint() == run.steps()[-1] and run.json("summary.json")["status"] == "stopped"
    none_left(home, slurm)
    second = command(slurm, home, "stop", "runs/latest")
    assert second.code == 2 and "the run is not running; see moe-asyncrl status" in second.err
