"""How a job stands, in words: from `squeue`, whose answer may be missing."""

from __future__ import annotations

import msgspec

from moe_asyncrl.cluster.slurm.call import GONE, SlurmRefused, SlurmSilent, slurm

WAITS = {
    "Resources": "waits for nodes to become free",
    "Priority": "waits behind jobs of higher priority",
    "Dependency": "waits for another job",
    "BeginTime": "waits for its start time (a job that was queued again waits about two minutes)",
    "JobHeldUser": "is held; release it with scontrol release",
    "JobHeldAdmin": "is held by an administrator",
    "PartitionConfig": "asks for more than its partition can ever give",
    "PartitionNodeLimit": "asks for more nodes than its partition allows",
    "PartitionTimeLimit": "asks for more time than its partition allows; lower time_limit",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is not taking jobs",
    "ReqNodeNotAvail": "waits for nodes that are down or reserved",
    "BadConstraints": "asks for what no node has",
    "Reservation": "waits for its reservation",
    "Licenses": "waits for a licence",
    "InvalidAccount": "its account is not valid; set account in the cluster file",
    "InvalidQOS": "its quality of service is not valid; set qos in the cluster file",
    "launch failed requeued held": "could not be started and is held; see the node's Slurm log",
}
ENDS = {
    "COMPLETED": "has ended",
    "FAILED": "ended with an error",
    "CANCELLED": "was cancelled",
    "TIMEOUT": "ran into its time limit",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "ran out of memory",
    "PREEMPTED": "was preempted",
    "BOOT_FAIL": "its nodes did not boot",
    "DEADLINE": "missed its deadline",
}
PENDING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING")


class JobLook(msgspec.Struct, frozen=True, kw_only=True):
    """One job, or one component of a het job, as Slurm sees it now."""

    job: str
    state: str
    """Slurm's word, for example RUNNING."""
    reason: str
    nodes: str
    used: str
    limit: str

    @property
    def over(self) -> bool:
        """It will not run any more."""
        return self.state in ENDS

    @property
    def pending(self) -> bool:
        """It does not run yet."""
        return self.state in PENDING

    def words(self) -> str:
        """One line for a person."""
        if self.state == "RUNNING":
            return f"job {self.job} runs on {self.nodes}, {self.used} of {self.limit}"
        if self.pending:
            known = next((text for key, text in WAITS.items() if self.reason.startswith(key)), None)
            if known is None and self.reason.startswith(("QOS", "Assoc", "Max")):
                known = f"waits because of a limit of its account or quality of service ({self.reason})"
            if known is None:
                known = "is about to start" if self.reason in ("None", "") else f"waits ({self.reason})"
            return f"job {self.job} {known}"
        return f"job {self.job} {ENDS.get(self.state, 'is ' + self.state.lower())}"


def look_at_job(job: str, deadline_s: float) -> list[JobLook]:
    """The job's components; empty if Slurm has forgotten it, which it does minutes after its end.

    Raises `SlurmSilent` if Slurm does not answer.
    """
    try:
        said = slurm(
            ["squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%i|%T|%r|%N|%M|%l"],
            deadline_s=deadline_s,
        )
    except SlurmRefused as error:
        if GONE in error.said:
            return []
        raise SlurmSilent(str(error)) from None
    return parse_looks(said)


def parse_looks(said: str) -> list[JobLook]:
    """Lines of `squeue`; one of another form is passed over."""
    rows = [line.strip().split("|") for line in said.splitlines()]
    return [
        JobLook(job=row[0], state=row[1], reason=row[2], nodes=row[3], used=row[4], limit=row[5])
        for row in rows
        if len(row) == 6
    ]
