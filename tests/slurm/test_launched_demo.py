"""The demo, shortened, through `launch`: a het job on two nodes whose first nine GPUs are taken. One run for all."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.slurm.fixture import Cluster
from tests.slurm.runs import START_S, Run, Said, command, none_left, processes, write_cluster
from tests.system.command import COMMAND, metrics

TAKEN = 9
SHORT = ("run.steps=3", "warmup.steps=5", "replay.probe_every=0", "eval.max_prompts=20", "rollout.groups_per_step=16")


@dataclass
class Launched:
    """The run after its end, and what its processes were told."""

    said: Said
    run: Run
    environments: dict[str, dict[str, str]] = field(default_factory=dict)
    """By role; the SGLang server as `server`."""
    standing: str = ""
    """What `status` said in the middle of it."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the user."""
    return tmp_path_factory.mktemp("launched")


@pytest.fixture(scope="module")
def demo(slurm: Cluster, home: Path) -> Iterator[Launched]:
    """Launched from a shell that exports nothing to jobs and steps, and that names another partition."""
    taken = slurm.occupy(TAKEN)
    site = write_cluster(
        home / "site.yaml",
        trainer={"nodes": 1, "cpus_per_node": 4, "gpus_per_node": 2},
        engine={"nodes": 1, "cpus_per_node": 4, "gpus_per_node": 1},
        environment={"FROM_FILE": "it's; $HOME here"},
    )
    shell = {"SLURM_EXPORT_ENV": "NONE", "SBATCH_EXPORT": "NONE", "SBATCH_PARTITION": "nowhere", "FROM_SHELL": "yes"}
    process = subprocess.Popen(
        [str(COMMAND), "launch", "demo", "--cluster", str(site), "--wait", *SHORT],
        cwd=home,
        env={**slurm.environment, **shell},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    launched = Launched(Said(0, "", ""), Run(home / "runs" / "latest"))
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        for found in processes(home):
            try:
                line, environment = found.cmdline(), found.environ()
            except psutil.Error:
                continue
            if line[3:4] == ["role"]:
                name = f"trainer-{environment['SLURM_PROCID']}" if line[4] == "trainer" else line[4]
                launched.environments[name] = environment
            elif "moe_asyncrl.engine.plugin.serve" in line:
                launched.environments["server"] = environment
        if not launched.standing and launched.run.steps():
            launched.standing = command(slurm, home, "status", "runs/latest").out
        time.sleep(1.0)
    if process.poll() is None:
        process.kill()
    out, err = process.communicate(timeout=30)
    launched.said = Said(process.returncode, out, err)
    launched.run = Run((home / "runs" / "latest").resolve())
    yield launched
    slurm.cancel(taken)


def test_it_ends_well_and_leaves_nothing(demo: Launched, slurm: Cluster, home: Path) -> None:
    from tests.slurm.runs import story

    assert demo.said.code == 0 and demo.said.err == "", f"{demo.said}\n{story(demo.run.folder)}"
    summary = demo.run.json("summary.json")
    assert (summary["status"], summary["error"], summary["steps"]) == ("ok", None, 3)
    assert summary["replay_coverage"] == 1.0 and summary["weight_versions"] == 4
    assert [m["step"] for m in metrics(demo.run.folder, "step")] == [1, 2, 3]
    assert len(metrics(demo.run.folder, "eval")) >= 2
    (taken,) = {line.split()[0] for line in slurm.jobs()}
    none_left(home, slurm, keep=[taken])


def test_the_command_shows_the_run(demo: Launched) -> None:
    lines = demo.said.out.splitlines()
    assert lines[0].endswith(": a het job of 2 nodes") and lines[1] == str(demo.run.folder)
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1/3", "2/3", "3/3"]
    assert any(line.startswith("ok: 3 steps in ") for line in lines)


def test_every_process_has_the_environment(demo: Launched) -> None:
    """Of the cluster file and of the shell, whatever the shell says of exports; interfaces are the file's."""
    assert set(demo.environments) == {"buffer", "rollout", "engine", "server", "trainer-0", "trainer-1"}
    for name, environment in demo.environments.items():
        assert environment["FROM_FILE"] == "it's; $HOME here", name
        assert environment["FROM_SHELL"] == "yes" and environment["GLOO_SOCKET_IFNAME"] == "lo", name
    ranks = [demo.environments[f"trainer-{rank}"] for rank in (0, 1)]
    assert {e["MASTER_PORT"] for e in ranks} == {ranks[0]["MASTER_PORT"]}
    assert [e["SLURMD_NODENAME"] for e in ranks] == ["node1", "node1"]
    assert demo.environments["server"]["SLURMD_NODENAME"] == "node2"


def test_gpus_past_nine_are_numbers(demo: Launched) -> None:
    """Nine are taken: the ranks have 9 and 10 of their node, the engine has 9 of its own."""
    assert demo.environments["trainer-0"]["SLURM_STEP_GPUS"] == "9,10"
    seen = {}
    for name in ("trainer-0", "trainer-1", "engine-0"):
        log = (demo.run.folder / "logs" / f"{name}.log").read_text()
        seen[name] = [line.partition(f"{name} on ")[2] for line in log.splitlines() if f"{name} on " in line]
    assert seen == {
        "trainer-0": ["node1, GPUs 9"],
        "trainer-1": ["node1, GPUs 10"],
        "engine-0": ["node2, GPUs 9"],
    }
    assert demo.environments["server"]["CUDA_VISIBLE_DEVICES"] == "9"


def test_status_shows_job_nodes_roles_step_and_version(demo: Launched, slurm: Cluster, home: Path) -> None:
    job = demo.run.json("slurm.json")["job"]
    for words in (
        "status   running",
        f"job {job}+0 runs on node1",
        f"job {job}+1 runs on node2",
        "of 3, version ",
        "trainer      node1 running",
        "engine-0     node2 running, serving version ",
        "buffer       node1 running",
    ):
        assert words in demo.standing, demo.standing
    after = command(slurm, home, "status", "runs/latest")
    assert after.code == 0 and "status   ok, 3 steps in " in after.out and "has ended" in after.out


def test_logs_show_roles_by_name(demo: Launched, slurm: Cluster, home: Path) -> None:
    every = command(slurm, home, "logs", "runs/latest", "--follow").out.splitlines()
    assert {"buffer", "engine-0", "rollout-0", "supervisor", "trainer-0", "trainer-1"} <= {
        w.split()[0] for w in every if w
    }
    one = command(slurm, home, "logs", "runs/latest", "trainer-1", "--lines", "1000").out
    assert "trainer-1 on node1, GPUs 10" in one and "trainer-0 on" not in one
    unknown = command(slurm, home, "logs", "runs/latest", "trainer-7")
    assert unknown.code == 2 and "no log of 'trainer-7'; there are: buffer, " in unknown.err


def test_the_run_folder_keeps_what_was_submitted(demo: Launched) -> None:
    script = (demo.run.folder / "job.sbatch").read_text()
    assert "#SBATCH hetjob\n" in script and "#SBATCH --gres=gpu:2\n" in script and "#SBATCH --gres=gpu:1\n" in script
    assert (demo.run.folder / "cluster.yaml").is_file()
    owner = demo.run.json("supervisor.json")
    assert owner["ended"] is not None and owner["job"] == demo.run.json("slurm.json")["job"]
    assert {json.dumps(role["state"]) for role in owner["roles"]} == {'"ended"'}
