"""Core attention for any device: grouped queries, multi-latent shapes, windows, sinks, packing, context parallelism.

Takes the place of Megatron-Core's `DotProductAttention`, which knows neither packed sequences nor context parallelism.
Built on `torch.nn.functional.scaled_dot_product_attention`.

Packed sequences are short and many, so they are attended to in padded batches of similar lengths
(`moe_asyncrl.train.packed_batches`). Padding stands at the end of a sequence, where causality already hides it from
every real token: the result is that of one call a sequence, and only windows and context parallelism build a mask.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention

from moe_asyncrl.train.norm_over_heads import sharded_along_heads
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
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            # Megatron-Core's name for each head's sink.
            heads = config.num_attention_heads // groups.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        elif config.softmax_type != "vanilla":
            raise ValueError(f"softmax_type {config.softmax_type} is not supported")

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
        if self.window is not None and allowed is None:
            at = torch.arange(query.shape[2], device=query.device)
            allowed = self._visible(at[:, None], at[None])
        if self.softmax_offset is not None:
            return attend_with_sinks(query, key, value, self.softmax_offset, self._scale(query), allowed)
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

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For Megatron-Core's checkpoints: the sinks are one tensor over the tensor-parallel ranks."""
        return sharded_along_heads(self, "softmax_offset", prefix, sharded_offsets, metadata)

    def _scale(self, query: torch.Tensor) -> float:
        return query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def _visible(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """Which keys a query sees: none after it, and of those before it only the window."""
        visible = key_positions <= query_positions
        return visible if self.window is None else visible & (query_positions - key_positions < self.window)

    def _unpacked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, forbidden: torch.Tensor | None
    ) -> torch.Tensor:
        allowed = None
        if forbidden is not None:
            at = torch.arange(query.shape[0], device=query.device)
            allowed = ~forbidden if self.window is None else ~forbidden & self._visible(at[:, None], at[None])
        size, rank = self.cp_group.size(), self.cp_group.rank()
        if size > 1:
            length = query.shape[0]
            column = torch.arange(length, device=query.device)
            own = zigzag(column, length, rank, size)
            everyone = torch.cat([zigzag(column, length, other, size) for other in range(size)])
            key, value = gather_sequence(key, self.cp_group), gather_sequence(value, self.cp_group)
            allowed = self._visible(own[:, None], everyone[None])
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
                allowed = self._visible(batch.query_positions[:, None, :, None], batch.key_positions[:, None, None, :])
            parts.append(self._attend(q, k, v, allowed).transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, plan.order)


def attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    allowed: torch.Tensor | None,
) -> torch.Tensor:
    """Attention whose softmax has one more logit a head, `sinks` [heads], that adds nothing to the output.

    The sink is a key of its own in front of the others, with value 0: one more element of each head, 1 in that key, 0
    in all others and sink / scale in the query, gives its logit. Causality then needs one more query in front, too.
    """
    batch, heads, length, _ = query.shape
    extra = (sinks.to(query.dtype) / scale).view(1, heads, 1, 1).expand(batch, heads, length, 1)
    query = torch.cat([query, extra], -1)
    key = F.pad(F.pad(key, (0, 1)), (0, 0, 1, 0))
    mark = torch.zeros_like(key)
    mark[:, :, 0, -1] = 1
    key, value = key + mark, F.pad(value, (0, 0, 1, 0))
    grouped = key.shape[1] != heads
    if allowed is not None:
        seen = F.pad(allowed, (1, 0), value=True)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=grouped)
    query = F.pad(query, (0, 0, 1, 0))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return out[:, :, 1:]


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
