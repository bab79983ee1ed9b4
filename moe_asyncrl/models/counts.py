"""Parameter counts, summed over the parameter map so that they cannot disagree with it."""

from __future__ import annotations

from fractions import Fraction

from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.spec import ModelSpec


def total_parameters(spec: ModelSpec) -> int:
    """Elements of all distinct HF tensors."""
    return sum(tensor.numel for tensor in parameter_map(spec).hf_tensors())


def active_parameters(spec: ModelSpec) -> int:
    """Elements that one token's forward reads: all experts count by the share `experts_per_token / num_experts`."""
    share = Fraction(spec.experts_per_token, spec.num_experts) if spec.is_moe else Fraction(0)
    active = Fraction(0)
    for entry in parameter_map(spec).entries:
        if not entry.tied_copy:
            size = sum(tensor.numel for tensor in entry.hf)
            active += size if entry.expert is None else size * share
    return int(active)
