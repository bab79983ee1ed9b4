"""Which role runs on which node: from a recipe and a cluster file, as a value, before any node is known."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from moe_asyncrl.cluster.launcher import engine_count, world_size
from moe_asyncrl.config.cluster import Cluster, Nodes
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError

Shape = Literal["one", "het"]
"""`one` allocation of like nodes, or a `het` job of two kinds of nodes."""


class EnginePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where one engine runs."""

    group: int
    """0: the trainer's nodes; 1: the engines' own."""
    node: int
    """Which node of that group."""
    gpus: tuple[int, ...]
    """Positions among the job's GPUs on that node; empty on a cluster without."""


class RunLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run on its nodes. Group 0 are the trainer's nodes, group 1 the engines'."""

    shape: Shape
    groups: tuple[Nodes, ...]
    ranks: int
    ranks_per_node: int
    """Rank r runs on node r // ranks_per_node, on GPU r % ranks_per_node of it."""
    gpus: bool
    """Trainer ranks have a GPU each."""
    engines: tuple[EnginePlace, ...]


def lay_out(recipe: Recipe, cluster: Cluster) -> RunLayout:
    """Trainer ranks in blocks over their nodes, engines likewise over theirs. A GPU has one role, unless colocated.

    Raises `UserError` with the field to change if the nodes do not hold the roles.
    """
    t = cluster.trainer
    ranks, engines, tp = world_size(recipe), engine_count(recipe), recipe.engine.tp
    if ranks % t.nodes:
        raise UserError(
            f"trainer.nodes {t.nodes} of the cluster file does not divide the recipe's {ranks} trainer ranks"
        )
    per_node = ranks // t.nodes
    if t.gpus_per_node and per_node > t.gpus_per_node:
        raise UserError(
            f"the recipe's {ranks} trainer ranks on {t.nodes} nodes need {per_node} GPUs of each; "
            f"trainer.gpus_per_node of the cluster file is {t.gpus_per_node}"
        )
    if not t.gpus_per_node and per_node > t.cpus_per_node:
        raise UserError(
            f"the recipe's {ranks} trainer ranks on {t.nodes} nodes need {per_node} CPUs of each; "
            f"trainer.cpus_per_node of the cluster file is {t.cpus_per_node}"
        )
    own = cluster.engine if engines else None
    colocated = recipe.engine.colocated
    if own is not None and colocated:
        raise UserError("the recipe's engines are colocated with the trainer: leave out `engine` of the cluster file")
    nodes, group, first = (own, 1, 0) if own is not None else (t, 0, 0 if colocated else per_node)
    each = math.ceil(engines / nodes.nodes)
    places = tuple(
        EnginePlace(
            group=group,
            node=i // each,
            gpus=tuple(range(first + i % each * tp, first + (i % each + 1) * tp)) if nodes.gpus_per_node else (),
        )
        for i in range(engines)
    )
    need, field = first * (nodes.gpus_per_node > 0) + each * tp, "engine" if own is not None else "trainer"
    if nodes.gpus_per_node and engines and need > nodes.gpus_per_node:
        shared = f" beside {first} trainer ranks" if own is None else ""
        raise UserError(
            f"{engines} engines with tp {tp} on {nodes.nodes} nodes{shared} need {need} GPUs of a node "
            f"(a server lives on one node); {field}.gpus_per_node of the cluster file is {nodes.gpus_per_node}"
        )
    if own is not None and own.nodes > engines:
        raise UserError(f"engine.nodes {own.nodes} of the cluster file is more than the recipe's {engines} engines")
    groups = (t,) if own is None else (t, own)
    alike = own is None or msgspec.structs.replace(own, nodes=t.nodes) == t
    return RunLayout(
        shape="one" if alike else "het",
        groups=groups,
        ranks=ranks,
        ranks_per_node=per_node,
        gpus=t.gpus_per_node > 0,
        engines=places,
    )


def total_nodes(layout: RunLayout) -> int:
    """Nodes of the whole job."""
    return sum(group.nodes for group in layout.groups)
