"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd of its own, with twelve GPUs a node.

The GPUs are character devices, all that Slurm looks for. Ports are free ones, everything is written below one folder,
and no service of the machine is touched.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from moe_asyncrl.engine.ports import free_port

GPUS = 12
NODES = ("node1", "node2")
CONF = """
ClusterName=fixture
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={base}/munge/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool.%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=120
KillWait=5
GresTypes=gpu
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 Boards=1 SocketsPerBoard=1 \
CoresPerSocket=8 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:{gpus}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 Boards=1 SocketsPerBoard=1 \
CoresPerSocket=8 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:{gpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=7-00:00:00 State=UP
PartitionName=short Nodes=node1 MaxTime=00:10:00 State=UP
"""


class Cluster:
    """The running cluster."""

    def __init__(self, base: Path) -> None:
        """Start it below `base`, which must be new."""
        self.base = base
        self.conf = base / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        for folder in ("munge", "state", "log", *(f"spool.{node}" for node in NODES)):
            (base / folder).mkdir(parents=True, mode=0o755)
        # munge wants no folder above its socket to be open to others, and pytest's are closed ones.
        key = base / "munge" / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        user = psutil.Process().username()
        ports: list[int] = []
        while len(ports) <= len(NODES):
            if (port := free_port()) not in ports:
                ports.append(port)
        self.conf.write_text(
            CONF.format(host=socket.gethostname().partition(".")[0], user=user, base=base, ports=ports, gpus=GPUS)
        )
        (base / "gres.conf").write_text(f"Name=gpu File={self._devices()}\n")
        try:
            self._start()
        except BaseException:
            self.down()
            raise

    def ask(self, *command: str, limit_s: float = 30.0) -> str:
        """What a Slurm command prints."""
        ended = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
        assert ended.returncode == 0, f"{command}: {ended.stderr}"
        return ended.stdout

    def jobs(self) -> list[str]:
        """Jobs that wait or run."""
        return self.ask("squeue", "--noheader", "--format=%i %T %r").splitlines()

    def occupy(self, gpus: int) -> str:
        """Take the first GPUs of both nodes; the job's number."""
        job = self.ask(
            "sbatch", "--parsable", f"--gres=gpu:{gpus}", "--nodes=2", "--output=/dev/null", "--wrap=sleep 3600"
        ).strip()
        wait_until("the GPUs are taken", lambda: f"{job} RUNNING None" in self.jobs())
        return job

    def cancel(self, job: str) -> None:
        """End a job and wait until it is gone."""
        self.ask("scancel", job)
        wait_until("the job is gone", lambda: not any(line.startswith(job) for line in self.jobs()))

    def down(self) -> None:
        """End every job and every process of the cluster."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            for line in self.jobs():
                self.ask("scancel", line.split()[0])
            wait_until("all jobs are gone", lambda: not self.jobs(), 20)
        mine = self._processes()
        for process in mine:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(mine, timeout=10)
        for process in alive:
            process.kill()

    def _devices(self) -> str:
        """Character devices that stand for GPUs: copies of /dev/null for root, terminals for others."""
        if os.getuid() != 0:
            return f"/dev/tty[0-{GPUS - 1}]"
        (self.base / "gpus").mkdir()
        for number in range(GPUS):
            os.mknod(self.base / "gpus" / f"nvidia{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        return f"{self.base}/gpus/nvidia[0-{GPUS - 1}]"

    def _start(self) -> None:
        munge = self.base / "munge"
        names = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{option}={munge / name}" for option, name in names.items()]
        self._run("munged", "--force", *options, f"--seed-file={munge / 'seed'}", "--num-threads=2")
        self._run("slurmctld", "-c")
        # It goes into the background before some fatal errors: only an answer proves anything.
        wait_until("slurmctld answers", lambda: self._quiet("scontrol", "ping"), 20, self._story)
        for node in NODES:
            self._run("slurmd", "-N", node, "-c")
        idle = lambda: len(self.ask("sinfo", "--noheader", "--Node", "--states=idle", "--partition=all").splitlines())  # noqa: E731
        wait_until("both nodes are idle", lambda: idle() == len(NODES), 30, self._story)

    def _run(self, name: str, *options: str) -> None:
        path = shutil.which(name) or f"/usr/sbin/{name}"
        ended = subprocess.run([path, *options], env=self.environment, capture_output=True, timeout=30, check=False)
        assert ended.returncode == 0, f"{name}: {ended.stderr.decode()}\n{self._story()}"

    def _quiet(self, *command: str) -> bool:
        ended = subprocess.run(command, env=self.environment, capture_output=True, timeout=30, check=False)
        return ended.returncode == 0 and b"DOWN" not in ended.stdout

    def _story(self) -> str:
        logs = sorted((self.base / "log").glob("*.log"))
        return "\n".join(f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-8:]) for log in logs)

    def _processes(self) -> list[psutil.Process]:
        """Daemons and step managers of this cluster, told by its folder in their command or environment."""
        found = []
        for process in psutil.process_iter(["name"]):
            if process.info["name"] in ("munged", "slurmctld", "slurmd", "slurmstepd", "slurmscriptd"):
                with contextlib.suppress(psutil.Error):
                    text = " ".join(process.cmdline()) + " ".join(process.environ().values())
                    if str(self.base) in text:
                        found.append(process)
        return found


def wait_until(
    what: str, true: Callable[[], object], limit_s: float = 60.0, story: Callable[[], str] = lambda: ""
) -> None:
    """Fails after `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}\n{story()}"
        time.sleep(0.2)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster, for the whole session."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm") / "cluster")
    yield cluster
    cluster.down()
