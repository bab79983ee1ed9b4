"""The nodes that a job got, with their addresses: names and NodeAddr from Slurm, as names need not resolve."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping

from moe_asyncrl.cluster.slurm.layout import RunLayout
from moe_asyncrl.cluster.slurm.steps import Node
from moe_asyncrl.data.errors import UserError

Ask = Callable[[list[str]], str]
"""Runs a Slurm command and returns what it prints."""
Resolve = Callable[[str], str]


def allocated(
    layout: RunLayout, environment: Mapping[str, str], ask: Ask, resolve: Resolve = socket.gethostbyname
) -> list[list[Node]]:
    """The nodes of each group of the layout, in Slurm's order.

    Raises `UserError` outside of a job, if the job has other nodes than the layout asks for, or if a node has no
    address that the others can reach.
    """
    if layout.shape == "het":
        lists = [_variable(environment, f"SLURM_JOB_NODELIST_HET_GROUP_{g}") for g in range(len(layout.groups))]
    else:
        lists = [_variable(environment, "SLURM_JOB_NODELIST")]
    names = [name for text in lists for name in ask(["scontrol", "show", "hostnames", text]).split()]
    wanted = sum(group.nodes for group in layout.groups)
    if len(names) != wanted:
        raise UserError(f"the job has {len(names)} nodes ({', '.join(names)}), and the run needs {wanted}")
    said = ask(["scontrol", "show", "node", ",".join(names), "--oneliner"])
    addresses = node_addresses(said)
    nodes = [Node(name=name, address=_numeric(name, addresses.get(name, name), resolve)) for name in names]
    _check_reach(nodes, addresses)
    groups, at = [], 0
    for group in layout.groups:
        groups.append(nodes[at : at + group.nodes])
        at += group.nodes
    return groups


def component_ids(environment: Mapping[str, str]) -> list[str]:
    """Numbers of the job: one, or one for each component of a het job."""
    size = int(environment.get("SLURM_HET_SIZE", "0"))
    if size:
        return [_variable(environment, f"SLURM_JOB_ID_HET_GROUP_{g}") for g in range(size)]
    return [_variable(environment, "SLURM_JOB_ID")]


def node_addresses(said: str) -> dict[str, str]:
    """NodeAddr by NodeName, from `scontrol show node --oneliner`."""
    found = {}
    for line in said.splitlines():
        name, address = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bNodeAddr=(\S+)", line)
        if name and address:
            found[name[1]] = address[1]
    return found


def _variable(environment: Mapping[str, str], name: str) -> str:
    try:
        return environment[name]
    except KeyError:
        raise UserError(f"{name} is not set: this command is what a Slurm job starts; see moe-asyncrl launch") from None


def _numeric(name: str, address: str, resolve: Resolve) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        pass
    try:
        return resolve(address)
    except OSError as error:
        raise UserError(
            f"node {name}: its address {address!r} does not resolve ({error}); "
            "Slurm's NodeAddr must be an address, or a name that the nodes can resolve"
        ) from None


def _check_reach(nodes: list[Node], addresses: Mapping[str, str]) -> None:
    """A name that resolves to the loopback address on the node itself is of no use to the others."""
    for node in nodes:
        told = addresses.get(node.name, node.name)
        if len(nodes) > 1 and node.address != told and ipaddress.ip_address(node.address).is_loopback:
            raise UserError(
                f"node {node.name}: {told!r} resolves to {node.address} here, where the other nodes cannot reach it; "
                "mend the hosts file, or set NodeAddr in Slurm"
            )
