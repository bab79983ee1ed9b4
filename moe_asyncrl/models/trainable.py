"""Which layouts the trainer takes: fewer than a checkpoint can be laid out for, and known before a run starts."""

from __future__ import annotations

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.shards import check_layout
from moe_asyncrl.models.spec import ModelSpec


def check_trainable(spec: ModelSpec, layout: Layout) -> None:
    """Raise UserError, naming the sizes, if `spec` cannot be trained under `layout`."""
    check_layout(spec, layout)
    if spec.kept_mtp_layers:
        raise UserError(
            f"{spec.family}: training does not carry multi-token-prediction layers yet; say `drop` for them in place "
            "of `keep` (model.mtp)"
        )
    for what, size in (("key/value heads", spec.num_kv_heads), ("hidden_size", spec.hidden_size)):
        if size % layout.tp:
            raise UserError(f"layout {layout}: {what} {size} is not a multiple of tp {layout.tp}")
