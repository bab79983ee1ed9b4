"""Parameter counts, summed over the parameter map so that they cannot disagree with it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Elements of a model's weights. Tied weights count once; buffers that are weights (expert biases) count."""

    total: int
    """All but multi-token-prediction layers."""
    active: int
    """Of these, what one token's forward reads: experts by the share `experts_per_token / num_experts`."""
    embedding: int
    output: int
    """The output layer's own weight; 0 where it is the embedding's."""
    mtp: int
    """Of the multi-token-prediction layers, without the copies of embedding and output layer that HF stores there."""


def count(spec: ModelSpec) -> Counts:
    """All counts of a model, whatever is said about its multi-token-prediction layers."""
    rows = spec.vocab_size * spec.hidden_size
    total = total_parameters(spec.with_mtp("drop"))
    mtp = total_parameters(spec.with_mtp("keep")) - total - 2 * rows * spec.mtp_layers if spec.mtp_layers else 0
    return Counts(
        total=total,
        active=active_parameters(spec.with_mtp("drop")),
        embedding=rows,
        output=0 if spec.tie_embeddings else rows,
        mtp=mtp,
    )


def total_parameters(spec: ModelSpec) -> int:
    """Elements of all distinct HF tensors that the map holds."""
    return sum(tensor.numel for tensor in parameter_map(spec).hf_tensors())


def active_parameters(spec: ModelSpec) -> int:
    """Elements that one token's forward reads: all experts count by the share `experts_per_token / num_experts`."""
    share = Fraction(spec.experts_per_token, spec.num_experts) if spec.is_moe else Fraction(0)
    dense, experts = 0, 0
    for entry in parameter_map(spec).entries:
        if entry.expert is not None:
            experts += entry.numel
        elif not entry.tied_copy:
            dense += entry.numel
    return int(dense + experts * share)
