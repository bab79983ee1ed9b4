"""Fault: the rotary embedding of packed sequences guesses the meaning of its table from the table's length.

Seen in Megatron-Core 0.16.1, `models.common.embeddings.rope_utils`: a table as long as all sequences together is taken
to hold one row per packed token, although text models always pass rows for positions 0, 1, 2, ...
Effect: where `max_seqlen` happens to equal the number of packed tokens, each sequence after the first is rotated as if
it went on from the one before: wrong results without an error. It also cuts the table once per sequence in each layer.
Mending: positions are counted from each sequence's start and looked up in one step. The guess is kept for the callers
that need it, models whose positions are not one-dimensional, told by `mrope_section`.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron_patches.patch import Patch

if TYPE_CHECKING:
    import torch


def packed_positions(cu_seqlens: torch.Tensor, cp_rank: int, cp_size: int) -> torch.Tensor:
    """Position of each of a context-parallel rank's tokens in its own sequence, int64 [tokens of the rank].

    `cu_seqlens` is int [sequences + 1] over the whole sequences. A rank holds, of each sequence cut into 2 * cp_size
    equal parts, part `cp_rank` and its mirror image (Megatron-Core's load-balanced order).
    """
    import torch

    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int64) // cp_size
    starts = torch.cumsum(lengths, 0) - lengths
    local = torch.arange(int(lengths.sum()), device=lengths.device) - torch.repeat_interleave(starts, lengths)
    half = torch.repeat_interleave(lengths // 2, lengths)
    return torch.where(local < half, cp_rank * half + local, (2 * cp_size - cp_rank - 2) * half + local)


def _mend(module: ModuleType) -> None:
    apply_by_guess = module.apply_rotary_pos_emb
    apply_unpacked = module._apply_rotary_pos_emb_bshd

    def apply_rotary_pos_emb(
        t: torch.Tensor,
        freqs: torch.Tensor,
        config: Any,
        cu_seqlens: torch.Tensor | None = None,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> torch.Tensor:
        if cu_seqlens is None or cp_group is None or config.apply_rope_fusion or config.mrope_section is not None:
            return apply_by_guess(t, freqs, config, cu_seqlens=cu_seqlens, mscale=mscale, cp_group=cp_group)
        positions = packed_positions(cu_seqlens, cp_group.rank(), cp_group.size())
        if positions.shape[0] != t.shape[0]:
            raise ValueError(f"cu_seqlens describe {positions.shape[0]} tokens of this rank, there are {t.shape[0]}")
        return apply_unpacked(
            t.unsqueeze(1),
            freqs[positions],
            rotary_interleaved=config.rotary_interleaved,
            multi_latent_attention=config.multi_latent_attention,
            mscale=mscale,
        ).squeeze(1)

    module.apply_rotary_pos_emb = apply_rotary_pos_emb  # type: ignore[attr-defined]


PATCH = Patch(
    name="packed_rope",
    seen_in="megatron-core 0.16.1",
    modules=("megatron.core.models.common.embeddings.rope_utils",),
    applies=lambda capabilities: not capabilities.transformer_engine,
    after=_mend,
)
