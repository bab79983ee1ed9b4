"""What a role's process is told by where it was started: its rank, its address, its GPUs, its network interfaces."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from moe_asyncrl.cluster.gpus import VISIBLE, given_ids, parse_positions, pick
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, LOCAL_RANK and WORLD_SIZE from Slurm's step, where they are not set. Raises `UserError` outside of one."""
    if "RANK" in environment:
        return {}
    try:
        return {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "WORLD_SIZE": environment["SLURM_NTASKS"],
        }
    except KeyError as error:
        raise UserError(f"trainer: no --index, and neither RANK nor {error.args[0]} is set") from None


def gpu_variables(gpus: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for the positions `gpus` among those that the process may use. See `role --gpus`."""
    if gpus is None:
        return {}
    return {VISIBLE: pick(given_ids(environment), parse_positions(gpus, environment))}


def check_interface(environment: Mapping[str, str], present: Collection[str]) -> None:
    """Raise `UserError` if gloo is told to use an interface that this node does not have."""
    for name in filter(None, environment.get(GLOO_INTERFACE, "").split(",")):
        if name not in present:
            raise UserError(
                f"{GLOO_INTERFACE} names {name!r}, and this node has {', '.join(sorted(present))}: "
                "set network.gloo in the cluster file to one of these, or leave it out"
            )


def with_host(recipe: Recipe, role: str, host: str | None) -> Recipe:
    """The recipe with the address that this role listens on, where the launcher knows it better than the recipe."""
    if host is None:
        return recipe
    replace = msgspec.structs.replace
    if role == "engine":
        return replace(recipe, engine=replace(recipe.engine, host=host))
    if role == "buffer":
        return replace(recipe, buffer=replace(recipe.buffer, host=host))
    if role == "trainer":
        return replace(recipe, weights=replace(recipe.weights, host=host))
    return recipe
