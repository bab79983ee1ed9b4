"""How SGLang spreads a model over the ranks of one server. Pure arithmetic.

Orders of ranks: `initialize_model_parallel` of `sglang/srt/distributed/parallel_state.py` (0.5.23). Attention sees
attention_dp x attention_tp, experts see ep x moe_tp, over the same `tp` ranks; the rightmost varies fastest.
Expert copies: `sglang/srt/eplb/expert_location.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_asyncrl.config.recipe import Engine
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.spec import ModelSpec

NO_ATTENTION_DP = ("llama", "mixtral")
"""Families whose attention SGLang builds over all ranks whatever is asked for."""
NO_EXPERT_COPIES = ("mixtral", "glm4_moe", "gpt_oss")
"""Families whose MoE layer has no slots for redundant experts in SGLang, or whose loader does not fill them."""
NO_PLACEMENT = ("mixtral", "gpt_oss")
"""Families whose loader takes experts in their own order, wherever they are asked to lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """Sizes of one server's axes, and where copies of experts lie.

    Raises:
        UserError: sizes that do not fit together.
    """

    tp: int = 1
    """Ranks of the server."""
    ep: int = 1
    """Expert parallelism; each expert is cut over tp / ep ranks."""
    attention_dp: int = 1
    """Groups of ranks that each hold the whole attention (`--attn-dp-size`)."""
    redundant_experts: int = 0
    """Slots for copies: logical + redundant slots lie evenly over the ep ranks (`--ep-num-redundant-experts`)."""
    placement: tuple[tuple[int, ...], ...] = ()
    """Logical expert of each slot, in one row for all layers or a row a layer of the model. Empty: slot s holds
    expert s modulo their number, as SGLang starts."""
    dense_replicated: bool = False
    """Every rank holds the dense layers' feed-forward whole (`--moe-dense-tp-size 1`)."""
    shared_expert: Literal["tp", "replicated", "fused"] = "tp"
    """Cut over all ranks; whole on every rank (all-to-all backends); or one more expert on every ep rank."""
    dp_lm_head: bool = False
    """The output layer is cut as attention is (`--enable-dp-lm-head`)."""

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "attention_dp"):
            if getattr(self, name) < 1:
                raise UserError(f"engine layout: {name} is {getattr(self, name)}, it must be at least 1")
            if self.tp % getattr(self, name):
                raise UserError(f"engine layout: {name} {getattr(self, name)} does not divide tp {self.tp}")
        if self.redundant_experts < 0:
            raise UserError(f"engine layout: redundant_experts is {self.redundant_experts}")

    @property
    def attention_tp(self) -> int:
        """Ranks that attention is cut over."""
        return self.tp // self.attention_dp

    @property
    def moe_tp(self) -> int:
        """Ranks that each expert is cut over."""
        return self.tp // self.ep

    @classmethod
    def of(cls, engine: Engine) -> EngineLayout:
        """The layout that a recipe's engine section asks for, with what its `extra_args` say of it.

        Raises UserError for an argument without its number.
        """
        args = _arguments(engine.extra_args)
        attention_dp = args.get("--attn-dp-size", "1")
        if "--enable-dp-attention" in args:
            attention_dp = args.get("--dp-size", args.get("--data-parallel-size", attention_dp))
        all_to_all = args.get("--moe-a2a-backend", "none") != "none"
        return cls(
            tp=engine.tp,
            ep=engine.ep,
            attention_dp=_number("--attn-dp-size", attention_dp),
            redundant_experts=_number("--ep-num-redundant-experts", args.get("--ep-num-redundant-experts", "0")),
            dense_replicated=args.get("--moe-dense-tp-size") == "1",
            shared_expert="replicated" if all_to_all else "tp",
            dp_lm_head="--enable-dp-lm-head" in args,
        )

    def row(self, layer: int) -> int:
        """Which row of the placement belongs to a layer."""
        return layer if len(self.placement) > 1 else 0

    def slots(self, row: int, experts: int) -> tuple[int, ...]:
        """Logical expert of each slot."""
        if self.placement:
            return self.placement[row]
        return tuple(slot % experts for slot in range(experts + self.redundant_experts))

    def experts_of(self, ep_rank: int, row: int, experts: int) -> tuple[int, ...]:
        """Logical experts on one ep rank, ascending, each once however many slots of it are there."""
        slots = self.slots(row, experts)
        share = len(slots) // self.ep
        return tuple(sorted(set(slots[ep_rank * share : (ep_rank + 1) * share])))

    def ep_ranks(self, row: int, experts: int) -> tuple[tuple[int, ...], ...]:
        """For each logical expert the ep ranks that hold it, ascending, each once."""
        found: list[list[int]] = [[] for _ in range(experts)]
        for ep_rank in range(self.ep):
            for expert in self.experts_of(ep_rank, row, experts):
                found[expert].append(ep_rank)
        return tuple(tuple(ranks) for ranks in found)

    def __str__(self) -> str:
        shown = [f"tp{self.tp}", *(f"{n}{v}" for n, v in (("ep", self.ep), ("adp", self.attention_dp)) if v > 1)]
        if self.redundant_experts:
            shown.append(f"+{self.redundant_experts} experts")
        return "x".join(shown)


def check_engine_layout(spec: ModelSpec, engine: EngineLayout) -> None:
    """Raise UserError, naming the sizes, if a server cannot split the model so."""
    where = f"engine layout {engine}"
    sizes = [("attention heads", spec.num_attention_heads, "attention_tp", engine.attention_tp)]
    if engine.attention_tp <= spec.num_kv_heads:
        sizes.append(("key/value heads", spec.num_kv_heads, "attention_tp", engine.attention_tp))
    elif engine.attention_tp % spec.num_kv_heads:
        raise UserError(
            f"{where}: attention_tp {engine.attention_tp} is not a multiple of {spec.num_kv_heads} key/value heads"
        )
    if not all(spec.moe_layers) and not engine.dense_replicated:
        sizes.append(("intermediate_size", spec.intermediate_size, "tp", engine.tp))
    if spec.shared_expert_size and engine.shared_expert != "replicated":
        axis = ("moe_tp", engine.moe_tp) if engine.shared_expert == "fused" else ("tp", engine.tp)
        sizes.append(("width of the shared expert", spec.shared_expert_size, *axis))
    if spec.is_moe:
        sizes.append(("moe_intermediate_size", spec.moe_intermediate_size, "moe_tp", engine.moe_tp))
        sizes.append(("slots for experts", spec.num_experts + engine.redundant_experts, "ep", engine.ep))
    elif engine.ep > 1 or engine.redundant_experts:
        raise UserError(f"{where}: {spec.family} has no experts")
    for what, size, axis_name, parts in sizes:
        if size % parts:
            raise UserError(f"{where}: {what} {size} is not a multiple of {axis_name} {parts}")
    if engine.attention_dp > 1 and spec.family in NO_ATTENTION_DP:
        raise UserError(f"{where}: SGLang has no attention data-parallelism for {spec.family}; use attention_dp 1")
    if engine.redundant_experts and spec.family in NO_EXPERT_COPIES:
        raise UserError(f"{where}: SGLang has no redundant experts for {spec.family}; use 0")
    _check_placement(spec, engine, where)


def _check_placement(spec: ModelSpec, engine: EngineLayout, where: str) -> None:
    if engine.placement and (spec.family in NO_PLACEMENT or not spec.is_moe):
        raise UserError(f"{where}: SGLang lays the experts of {spec.family} out by itself; give no placement")
    if engine.placement and len(engine.placement) not in (1, spec.num_layers):
        raise UserError(f"{where}: the placement has {len(engine.placement)} rows; give one, or {spec.num_layers}")
    count = spec.num_experts + engine.redundant_experts
    for number, slots in enumerate(engine.placement):
        if len(slots) != count:
            raise UserError(f"{where}: row {number} of the placement has {len(slots)} slots, not {count}")
        if set(slots) != set(range(spec.num_experts)):
            raise UserError(
                f"{where}: row {number} of the placement must name each of {spec.num_experts} experts at least once"
            )


def _arguments(words: Sequence[str]) -> dict[str, str]:
    """`--name value` and `--name=value`; the value of a flag is empty."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value
        elif name:
            found[name] = word
    return found


def _number(name: str, value: str) -> int:
    if not value.isdigit():
        raise UserError(f"engine.extra_args: {name} has {value!r}, not a number")
    return int(value)
