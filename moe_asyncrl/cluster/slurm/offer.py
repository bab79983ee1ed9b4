"""What the cluster has, and whether it can ever give what a run asks for. Pure, from the words of `sinfo`."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from moe_asyncrl.cluster.slurm.layout import RunLayout
from moe_asyncrl.config.cluster import Cluster, Nodes

SINFO = ("sinfo", "--noheader", "--exact", "--all", "--format=%P|%D|%c|%m|%G|%l")
"""Partition, nodes, CPUs, MiB, GRES and time limit of each kind of node."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of one kind in one partition."""

    partition: str
    default: bool
    nodes: int
    cpus: int
    memory_mib: int
    gpus: dict[str, int]
    """By type; the type is empty where none is named."""
    limit_s: float
    """Longest job; infinite without a limit."""


def parse_offers(text: str) -> list[Offer]:
    """Lines of `SINFO`; a line of another form is passed over."""
    found = []
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) != 6 or not words[1].isdigit():
            continue
        partition, nodes, cpus, memory, gres, limit = words
        found.append(
            Offer(
                partition=partition.rstrip("*"),
                default=partition.endswith("*"),
                nodes=int(nodes),
                cpus=int(cpus.rstrip("+")),
                memory_mib=int(memory.rstrip("+")),
                gpus=gpus_of(gres),
                limit_s=seconds(limit),
            )
        )
    return found


def gpus_of(gres: str) -> dict[str, int]:
    """`gpu:h100:8(S:0-1),gpu:2,shard:4` -> {"h100": 8, "": 2}."""
    found: dict[str, int] = {}
    for kind, count in re.findall(r"(?:^|,)gpu(?::([A-Za-z_][\w.-]*))?(?::(\d+))?", gres):
        found[kind] = found.get(kind, 0) + int(count or 1)
    return found


def seconds(limit: str) -> float:
    """`2-00:00:00`, `30:00` (minutes and seconds) or `infinite`, in seconds."""
    days, _, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts) or (days and not days.isdigit()):
        return float("inf")
    if days or len(parts) == 3:
        hours, minutes, rest = (*map(int, parts), 0, 0)[:3]
    else:
        hours, (minutes, rest) = 0, (*map(int, parts), 0)[:2]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + rest)


def refusal(layout: RunLayout, cluster: Cluster, offers: Sequence[Offer]) -> str | None:
    """Why no node will ever do, in one sentence with what to change; None if the cluster could run it."""
    wants: dict[str, int] = {}
    for name, group in zip(("trainer", "engine"), layout.groups, strict=False):
        partition = group.partition or cluster.partition
        there = [o for o in offers if (o.partition == partition if partition else o.default)]
        if not there:
            known = ", ".join(sorted({o.partition for o in offers})) or "none"
            if partition is None:
                return f"the cluster has no default partition; name one of: {known}"
            return f"partition {partition!r} does not exist; there are: {known}"
        reason = _group_refusal(name, group, cluster, there)
        if reason is not None:
            return reason
        place = there[0].partition
        wants[place] = wants.get(place, 0) + group.nodes
        have = sum(o.nodes for o in there)
        if wants[place] > have:
            asked = f"{wants[place]} (trainer.nodes and engine.nodes)"
            return f"partition {place!r} has {have} nodes, and the run asks for {asked}"
        longest = max(o.limit_s for o in there)
        if seconds(cluster.time_limit) > longest:
            return f"time_limit {cluster.time_limit} is more than partition {place!r} allows"
    return None


def _group_refusal(name: str, group: Nodes, cluster: Cluster, there: Sequence[Offer]) -> str | None:
    place = there[0].partition
    kind = cluster.gres.partition(":")[2]
    gpus = [o.gpus.get(kind, 0) if kind else sum(o.gpus.values()) for o in there]
    if group.gpus_per_node > max(gpus):
        what = f"{kind} GPUs" if kind else "GPUs"
        most = f"the most that one has is {max(gpus)}" if max(gpus) else "its nodes have none"
        return f"no node of partition {place!r} has {group.gpus_per_node} {what} ({name}.gpus_per_node): {most}"
    cpus = max(o.cpus for o in there)
    if group.cpus_per_node > cpus:
        return (
            f"no node of partition {place!r} has {group.cpus_per_node} CPUs ({name}.cpus_per_node): "
            f"the most that one has is {cpus}"
        )
    memory = max(o.memory_mib for o in there)
    if group.memory_gib is not None and group.memory_gib * 1024 > memory:
        return (
            f"no node of partition {place!r} has {group.memory_gib} GiB ({name}.memory_gib): "
            f"the most that one has is {memory // 1024}"
        )
    able = sum(
        o.nodes
        for o, g in zip(there, gpus, strict=True)
        if g >= group.gpus_per_node and o.cpus >= group.cpus_per_node and o.memory_mib >= (group.memory_gib or 0) * 1024
    )
    if able < group.nodes:
        return f"{name}.nodes is {group.nodes}, and only {able} nodes of partition {place!r} are large enough"
    return None
