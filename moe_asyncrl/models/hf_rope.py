"""Rotary positions as a `config.json` describes them, in the spelling of transformers 4 or 5."""

from __future__ import annotations

from typing import Any, Literal

from moe_asyncrl.models.features import Llama3Rope, RopeScaling, Yarn
from moe_asyncrl.models.hf_fields import HfFields

Kind = Literal["yarn", "llama3"]
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_OF_KIND = {
    "default": set[str](),
    "yarn": {
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        "truncate",
    },
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}


def read_rope(
    fields: HfFields, *, theta: float, kinds: tuple[Kind, ...] = (), fraction: float | None = None
) -> dict[str, Any]:
    """The fields `rope_theta`, `rotary_fraction` and `rope_scaling` of a spec.

    Args:
        theta: the family's default base.
        kinds: the kinds of stretching that the family supports.
        fraction: the family's default part of a head that is turned; None where only whole heads are.

    Raises:
        UserError: the two spellings disagree, or something is asked for that the family does not support.
    """
    new, old = _object(fields, "rope_parameters"), _object(fields, "rope_scaling")
    stretched = next(((name, d) for name, d in (("rope_parameters", new), ("rope_scaling", old)) if _kind(d)), None)
    scaling = None
    for name, found in (("rope_parameters", new), ("rope_scaling", old)):
        kind = _kind(found) or "default"
        extra = sorted(set(found) - _COMMON - _OF_KIND.get(kind, set()))
        if (kind != "default" and kind not in kinds) or extra:
            asked = kind if kind not in ("default", *kinds) else ", ".join(extra)
            raise fields.fail(f"`{name}` asks for {asked!r}: this rotary scaling is not supported for this family")
    if stretched is not None:
        scaling = _scaling(HfFields(stretched[1], f"{fields.source}: `{stretched[0]}`"))
    return {
        "rope_theta": _agreed(fields, new, "rope_theta", theta),
        "rotary_fraction": _fraction(fields, new, fraction),
        "rope_scaling": scaling,
    }


def _kind(found: dict[str, Any]) -> str | None:
    kind = found.get("rope_type", found.get("type", "default"))
    return None if kind == "default" else str(kind)


def _scaling(fields: HfFields) -> RopeScaling:
    context = fields.integer("original_max_position_embeddings")
    factor = fields.number("factor")
    if _kind(dict(fields.config)) == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        return Llama3Rope(factor=factor, low_freq_factor=low, high_freq_factor=high, original_context=context)
    both = fields.config.get("mscale") and fields.config.get("mscale_all_dim")
    return Yarn(
        factor=factor,
        original_context=context,
        beta_fast=fields.number("beta_fast", default=32.0),
        beta_slow=fields.number("beta_slow", default=1.0),
        mscale=fields.number("mscale") if both else None,
        mscale_all_dim=fields.number("mscale_all_dim") if fields.config.get("mscale_all_dim") else None,
        rounds_range=fields.boolean("truncate", default=True),
    )


def _fraction(fields: HfFields, new: dict[str, Any], default: float | None) -> float:
    found = _agreed(fields, new, "partial_rotary_factor", 1.0 if default is None else default)
    if default is None and found != 1:
        raise fields.fail(f"`partial_rotary_factor` {found} is not supported: only 1 is")
    if found > 1:
        raise fields.fail(f"`partial_rotary_factor` {found} is more than 1")
    return found


def _agreed(fields: HfFields, nested: dict[str, Any], name: str, default: float) -> float:
    """A number that stands nested, flat or in both places."""
    inner, flat = nested.get(name), fields.config.get(name)
    if inner is not None and flat is not None and float(inner) != float(flat):
        raise fields.fail(f"`{name}` is {flat} but `rope_parameters.{name}` is {inner}")
    return HfFields({name: flat if inner is None else inner}, fields.source).number(name, default=default)


def _object(fields: HfFields, name: str) -> dict[str, Any]:
    found = fields.config.get(name) or {}
    if not isinstance(found, dict):
        raise fields.fail(f"`{name}` must be an object, found {found!r}")
    return found
