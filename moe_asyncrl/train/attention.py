"""Core attention for any device: grouped queries, multi-latent shapes, packed sequences, context parallelism.

Takes the place of Megatron-Core's `DotProductAttention`, which knows neither packed sequences nor context parallelism.
Built on `torch.nn.functional.scaled_dot_product_attention`.

Packed sequences are short and many, so they are attended to in padded batches of similar lengths
(`moe_asyncrl.train.packed_batches`). Padding stands at the end of a sequence, where causality already hides it from
every real token: the result is that of one call a sequence, and no mask is built without context parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from moe_asyncrl.train.packed_batches import PackedBatches, zigzag


class PortableAttention(MegatronModule):
    """Causal attention in Megatron-Core's calling convention."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = groups.cp
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend causally within each sequence.

        Packed: query [tokens, heads, d], key [tokens, kv_heads, d], value [tokens, kv_heads, dv] to
        [tokens, heads, dv]. Not packed: [length, batch, heads, d] and so on to [length, batch, heads * dv].
        An `attention_mask` (bool, True where attention is forbidden) replaces causality; it is not taken when packed.

        Raises:
            ValueError: an attention bias, which no supported model has.
        """
        if attention_bias is not None:
            raise ValueError("attention bias is not supported")
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            return self._packed(query, key, value, packed_seq_params)
        return self._unpacked(query, key, value, attention_mask)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[batch, heads, length, d] each; causal unless `allowed` (bool [queries, keys]) is given."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=allowed,
            is_causal=allowed is None,
            scale=self.softmax_scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=key.shape[1] != query.shape[1],
        )

    def _unpacked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, forbidden: torch.Tensor | None
    ) -> torch.Tensor:
        allowed = None if forbidden is None else ~forbidden
        size, rank = self.cp_group.size(), self.cp_group.rank()
        if size > 1:
            length = query.shape[0]
            column = torch.arange(length, device=query.device)
            own = zigzag(column, length, rank, size)
            everyone = torch.cat([zigzag(column, length, other, size) for other in range(size)])
            key, value = gather_sequence(key, self.cp_group), gather_sequence(value, self.cp_group)
            allowed = everyone[None] <= own[:, None]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return self._attend(query, key, value, allowed).permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Any) -> torch.Tensor:
        size, rank = self.cp_group.size(), self.cp_group.rank()
        width = query.shape[1] * query.shape[2]
        plan = PackedBatches.of(packed, width, size, rank, query.device)
        if size > 1:
            key, value = gather_sequence(key, self.cp_group), gather_sequence(value, self.cp_group)
        rows = [batch.rows * batch.length for batch in plan.batches]
        queries = torch.split(query.index_select(0, plan.queries), rows)
        gathered = [n * size for n in rows]
        keys, values = (torch.split(x.index_select(0, plan.keys), gathered) for x in (key, value))
        parts = []
        for batch, *flat in zip(plan.batches, queries, keys, values, strict=True):
            # [rows * length, heads, d] to [rows, heads, length, d]
            q, k, v = (x.view(batch.rows, -1, *x.shape[1:]).transpose(1, 2) for x in flat)
            allowed = None
            if batch.query_positions is not None and batch.key_positions is not None:
                allowed = batch.key_positions[:, None, None, :] <= batch.query_positions[:, None, :, None]
            parts.append(self._attend(q, k, v, allowed).transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, plan.order)


class _GatherSequence(torch.autograd.Function):
    """All-gather along dimension 0; the gradient is reduce-scattered back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        torch.distributed.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        own = gradient.new_empty((gradient.shape[0] // ctx.group.size(), *gradient.shape[1:]))
        torch.distributed.reduce_scatter_tensor(own, gradient.contiguous(), group=ctx.group)
        return own, None


def gather_sequence(x: torch.Tensor, group: Any) -> torch.Tensor:
    """[length, ...] of each rank to [size * length, ...] in rank order, differentiable."""
    return _GatherSequence.apply(x, group)  # type: ignore[no-untyped-call]
