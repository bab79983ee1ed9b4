"""What is refused, before submission and by Slurm itself, jobs that wait, and runs of one machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_asyncrl.cli import main
from moe_asyncrl.cluster.roles import run_role
from moe_asyncrl.cluster.run_setup import create_run_folder, open_run
from moe_asyncrl.cluster.slurm.call import SlurmSilent
from moe_asyncrl.cluster.slurm.call import slurm as call
from moe_asyncrl.cluster.supervisor import Supervisor
from moe_asyncrl.config.load import dump_recipe, load_recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.engine.keys import ensure_engine_key
from moe_asyncrl.telemetry.run_folder import write_atomic
from tests.slurm.fixture import GPUS, Cluster, wait_until
from tests.slurm.runs import Run, command, write_cluster
from tests.system.command import Command
from tests.system.projects import make_project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a model, prompts, a reward and a recipe for supervised learning."""
    return make_project(
        tmp_path_factory.mktemp("project") / "mine",
        run={"steps": 100000},
        algorithm={"objective": "sft"},
        trainer={"dp": 1},
    )


@pytest.fixture
def inside(project: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process in the project, as a user of the cluster."""
    monkeypatch.chdir(project)
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    return project


@pytest.mark.parametrize(
    ("site", "says"),
    [
        ({"trainer": {"gpus_per_node": GPUS + 1}}, "no node of partition 'all' has 13 GPUs (trainer.gpus_per_node): "
         "the most that one has is 12"),
        ({"trainer": {"cpus_per_node": 9}}, "no node of partition 'all' has 9 CPUs (trainer.cpus_per_node)"),
        ({"trainer": {}, "partition": "gpus"}, "partition 'gpus' does not exist; there are: all, short"),
        ({"trainer": {}, "partition": "short", "time_limit": "01:00:00"}, "is more than partition 'short' allows"),
        ({"trainer": {"constraint": "quantum"}}, "Slurm refuses the job: "),
    ],
)  # fmt: skip
def test_what_cannot_run_is_one_line_and_leaves_nothing(
    inside: Path, slurm: Cluster, capsys: pytest.CaptureFixture[str], site: dict[str, Any], says: str
) -> None:
    path = write_cluster(inside / "site.yaml", **site)
    assert main(["launch", "recipe.yaml", "--cluster", str(path)]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1 and says in said.err and said.out == ""
    assert slurm.jobs() == [] and list((inside / "runs").glob("*")) == []


def test_a_dry_run_prints_script_and_steps_and_asks_nothing(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_CONF", "nowhere")
    path = write_cluster(inside / "site.yaml", trainer={"gpus_per_node": 1}, engine={"nodes": 2, "gpus_per_node": 4})
    arguments = ["launch", "recipe.yaml", "--cluster", str(path), "--dry-run"]
    assert main([*arguments, "algorithm.objective=grpo", "engine.count=2", "engine.tp=4", "run.name=tried"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash\n") and "#SBATCH hetjob" in out and "#SBATCH --job-name=tried" in out
    steps = [line for line in out.splitlines() if line.startswith("srun ")]
    assert [line.split("role ")[1].split()[0] for line in steps] == ["buffer", "engine", "engine", "trainer", "rollout"]
    assert "--host ADDRESS-2 --index 1 --gpus 0,1,2,3" in steps[2] and "--gpus rank" in steps[3]
    assert list((inside / "runs").glob("*")) == []


def test_a_job_that_waits_says_why_and_can_be_withdrawn(
    inside: Path, slurm: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = slurm.occupy(1)
    path = write_cluster(inside / "site.yaml", trainer={"gpus_per_node": GPUS})
    assert main(["launch", "recipe.yaml", "--cluster", str(path)]) == 0
    wait_until("Slurm has looked at it", lambda: any("PENDING Resources" in line for line in slurm.jobs()))
    capsys.readouterr()
    assert main(["status", "runs/latest"]) == 0
    out = capsys.readouterr().out
    assert "status   queued\n" in out and "waits for nodes to become free" in out
    assert main(["stop", "runs/latest"]) == 0
    assert "was waiting and is cancelled" in capsys.readouterr().out
    assert main(["status", "runs/latest"]) == 0
    assert "status   stopped" in capsys.readouterr().out
    slurm.cancel(taken)
    assert slurm.jobs() == []


def test_a_controller_that_never_answers_is_given_up_on(slurm: Cluster, tmp_path: Path) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        lines = slurm.conf.read_text().splitlines()
        port = f"SlurmctldPort={deaf.getsockname()[1]}"
        conf = tmp_path / "slurm.conf"
        conf.write_text("\n".join(port if line.startswith("SlurmctldPort=") else line for line in lines))
        with pytest.raises(SlurmSilent, match=r"sinfo did not answer within 1 s: is Slurm's controller up"):
            call(["sinfo"], deadline_s=1.0, environment={**os.environ, "SLURM_CONF": str(conf)})


# ---- fault 42: names of interfaces, folders made at once (variables are in test_launched_demo)


def test_a_role_that_is_told_a_wrong_interface_names_those_that_exist(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(load_recipe(project / "recipe.yaml")))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "net7")
    before = signal.getsignal(signal.SIGTERM)
    assert run_role("buffer", str(tmp_path), None, host="127.0.0.1") == 1
    assert signal.getsignal(signal.SIGTERM) is before
    error = (tmp_path / "logs" / "buffer.error").read_text()
    assert error.startswith("GLOO_SOCKET_IFNAME names 'net7', and this node has ") and "network.gloo" in error
    assert set(psutil.net_if_addrs()) <= set(re.findall(r"\w+", error))


def test_who_makes_one_folder_or_file_at_once_does_not_disturb_the_other(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen at once, all with one pid, as in containers on different nodes."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    recipe = load_recipe(project / "recipe.yaml", [f"run.folder={tmp_path / 'runs'}"])
    together = threading.Barrier(16)

    def make(number: int) -> tuple[Path, str]:
        together.wait()
        folder = create_run_folder(recipe)
        key = ensure_engine_key(tmp_path / "keys")
        for _ in range(20):
            write_atomic(tmp_path / "shared.json", str(number).encode() * 1000)
        return folder.path, key

    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(make, range(16)))
    assert len({path for path, _ in made}) == 16 and all((path / "recipe.yaml").is_file() for path, _ in made)
    assert (tmp_path / "runs" / "latest").resolve() in {path for path, _ in made}
    assert len({key for _, key in made}) == 1 and len(made[0][1]) == 64
    assert (tmp_path / "shared.json").read_text() in {str(n) * 1000 for n in range(16)}
    names = [*tmp_path.iterdir(), *(tmp_path / "runs").iterdir(), *(tmp_path / "keys").iterdir()]
    assert [p.name for p in names if p.name.startswith(".")] == []


# ---- the same commands on one machine


def test_status_and_stop_of_a_run_on_this_machine(project: Path, slurm: Cluster) -> None:
    """No Slurm is asked. A second supervisor is refused while the first one lives."""
    with Command(project, "run", "recipe.yaml", "run.name=here") as running:
        roles = "moe-asyncrl status shows its roles"
        running.until(roles, lambda: "  trainer-0    running\n" in command(slurm, project, "status", "runs/latest").out)
        run = Run(running.folder)
        said = command(slurm, project, "status", "runs/latest", SLURM_CONF="nowhere")
        assert said.code == 0 and "status   running\nprocess  supervisor " in said.out, said
        assert "  trainer-0    running\n" in said.out and "\nslurm " not in said.out
        folder, recipe = open_run(str(run.folder))
        of_the_first = folder.recipe.read_bytes()
        changed = [f"run.name={recipe.run.name}-2", "run.resume=true"]
        with pytest.raises(UserError, match=rf"its supervisor is alive \(pid {running.process.pid}\)"):
            Supervisor(folder, load_recipe(folder.recipe, changed)).run()
        assert folder.recipe.read_bytes() == of_the_first
        stopped = command(slurm, project, "stop", "runs/latest", "--now", SLURM_CONF="nowhere")
        assert stopped.code == 0 and stopped.out.startswith("asked to stop at once\nstopped: 0 steps"), stopped
        assert running.wait(60).code == 130 and running.none_left()
    assert run.json("summary.json")["status"] == "stopped"
