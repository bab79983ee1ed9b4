"""Makes the plan of a weight update from a model and two layouts. Pure arithmetic: no tensor, no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.engine_layout import EngineLayout, check_engine_layout
from moe_asyncrl.weights.plan import Deliveries, Mode, Plan, Receivers, Sends
from moe_asyncrl.weights.plan_buckets import fill_buckets
from moe_asyncrl.weights.plan_groups import ITEM_BYTES
from moe_asyncrl.weights.plan_sources import contents, root_per_bucket, senders_per_receiver
from moe_asyncrl.weights.plan_units import ALIGNMENT
from moe_asyncrl.weights.trainer_blocks import trainer_blocks


def make_plan(
    spec: ModelSpec,
    layout: Layout,
    engines: Sequence[EngineLayout],
    *,
    mode: Mode = "broadcast",
    dtype: str = "bfloat16",
    bucket_bytes: int = 64 * 1024 * 1024,
    roots_per_stage: int = 0,
    rows: int = 1,
) -> Plan:
    """The plan of a full update to `engines`, one layout for each. Same arguments, same plan.

    `dtype`: type that the weights travel in, but for tensors with a type of their own. `roots_per_stage`: most ranks of
    a pipeline stage that broadcast; 0 for no bound. `rows`: tensors are cut between so many rows where that many fit a
    bucket. The plan is not checked yet.

    Raises:
        UserError: a layout that does not fit the model, no engine, an unknown type, a bucket below 64 bytes.
    """
    if not engines:
        raise UserError("weight plan: there is no engine")
    if dtype not in ITEM_BYTES:
        raise UserError(f"weight plan: weights cannot travel as {dtype}; use one of {', '.join(ITEM_BYTES)}")
    if bucket_bytes < ALIGNMENT:
        raise UserError(f"weight plan: a bucket of {bucket_bytes} bytes is too small; it needs at least {ALIGNMENT}")
    different = tuple(dict.fromkeys(engines))
    for engine in different:
        check_engine_layout(spec, engine)
    blocks = trainer_blocks(spec, layout)
    filled, parts, pieces = fill_buckets(spec, layout, different, mode, dtype, bucket_bytes, rows)
    plan = Plan(
        spec=spec,
        layout=layout,
        engines=tuple(engines),
        mode=mode,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
        roots_per_stage=roots_per_stage,
        parts=parts,
        pieces=pieces,
        bucket_nbytes=np.array(filled.nbytes, np.int64),
        deliveries=Deliveries(*[np.zeros(0, np.int32)] * 3),
        sends=Sends(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int32)),
        receivers=(),
    )
    inside = contents(filled, parts, pieces, plan.piece_nbytes, blocks)
    if mode == "broadcast":
        everyone = Receivers(tuple(range(len(engines))), None)
        found = root_per_bucket(filled, inside, everyone, blocks.holders, layout, roots_per_stage)
    else:
        engines_of = [tuple(n for n, e in enumerate(engines) if e == one) for one in different]
        found = senders_per_receiver(filled, inside, engines_of, blocks.holders, layout.world_size)
    deliveries, sends, receivers = found
    return replace(plan, deliveries=deliveries, sends=sends, receivers=receivers)
