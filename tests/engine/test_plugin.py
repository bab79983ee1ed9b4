"""What runs inside SGLang's processes: attention, experts, stand-ins and how they are found."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.engine.command import EngineArgs, build_command, child_environment
from moe_asyncrl.engine.plugin import cpu_attention, cpu_backend, kernel_standin, standins
from moe_asyncrl.engine.plugin.cpu_attention import Plan, make_plan, plan_groups
from moe_asyncrl.engine.plugin.cpu_backend import decode, extend, take_sinks
from moe_asyncrl.engine.plugin.cpu_moe import grouped_experts, moe_forward
from moe_asyncrl.engine.plugin.cpu_norm import norm_over_heads

TOLERANCE = 1e-6
PLANTED = 100 * TOLERANCE
lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=12)


# --- attention ---------------------------------------------------------------------------------------------------


@given(lengths, st.sampled_from([4, 64]), st.sampled_from([600, 5_000, 1 << 24]))
def test_groups_hold_every_sequence_once_and_stay_bounded(
    shapes: list[tuple[int, int]], width: int, bound: int
) -> None:
    kv, q = [a + b for a, b in shapes], [b for _, b in shapes]
    groups, alone = plan_groups(kv, q, width, bound)
    assert sorted([i for g in groups for i in g] + alone) == list(range(len(shapes)))
    for group in groups:
        keys, queries = max(kv[i] for i in group), max(q[i] for i in group)
        assert len(group) * max(keys * width, queries * width, keys * queries) <= bound
        assert keys <= 2 * min(kv[i] for i in group) or len(group) * keys <= cpu_attention.MERGE_TOKENS
    for i in alone:
        assert max(kv[i] * width, q[i] * width, kv[i] * q[i]) > bound


class Cache:
    """Sequences scattered over a KV cache whose unused slots hold NaN."""

    def __init__(
        self, shapes: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, seed: int, value_dim: int = 0
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.prefix, self.new = [a for a, _ in shapes], [b for _, b in shapes]
        self.lengths = [a + b for a, b in shapes]
        slots = torch.randperm(2 * sum(self.lengths), generator=g)
        self.keys = torch.full((len(slots), kv_heads, dim), float("nan"))
        self.values = torch.full((len(slots), kv_heads, value_dim or dim), float("nan"))
        self.table = torch.randint(0, len(slots), (len(shapes) + 3, max(self.lengths) + 5), generator=g).int()
        self.requests = torch.randperm(len(shapes) + 3, generator=g)[: len(shapes)]
        start = 0
        for request, length in zip(self.requests.tolist(), self.lengths, strict=True):
            self.table[request, :length] = slots[start : start + length].int()
            start += length
        used = slots[:start]
        self.keys[used] = torch.randn(start, kv_heads, dim, generator=g)
        self.values[used] = torch.randn(start, kv_heads, self.values.shape[2], generator=g)
        self.query = torch.randn(sum(self.new), heads, dim, generator=g)
        self.sinks = torch.randn(heads, generator=g)

    def expected(self, window: int | None = None, sinks: bool = False) -> torch.Tensor:
        """By the definition, in float64."""
        out, row = torch.empty((*self.query.shape[:2], self.values.shape[2]), dtype=torch.float64), 0
        ratio = self.query.shape[1] // self.keys.shape[1]
        for request, prefix, new in zip(self.requests.tolist(), self.prefix, self.new, strict=True):
            index = self.table[request, : prefix + new].long()
            k = self.keys[index].double().repeat_interleave(ratio, 1)
            v = self.values[index].double().repeat_interleave(ratio, 1)
            for j in range(new):
                end = prefix + j + 1
                seen = slice(0 if window is None else max(0, end - 1 - window), end)
                scores = torch.einsum("hd,thd->ht", self.query[row].double(), k[seen]) / self.query.shape[2] ** 0.5
                if sinks:
                    scores = torch.cat([scores, self.sinks.double()[:, None]], 1)
                parts = scores.softmax(-1)[:, : end - seen.start]
                out[row] = torch.einsum("ht,thd->hd", parts, v[seen])
                row += 1
        return out


def never(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("the original loop was not needed")


def run(cache: Cache, original: Any = never, sinks: bool = False, **options: Any) -> torch.Tensor:
    out = torch.zeros(*cache.query.shape[:2], cache.values.shape[2])
    backend = types.SimpleNamespace(moe_asyncrl_plans={}, moe_asyncrl_sinks=cache.sinks if sinks else None)
    args = (cache.query, out, cache.keys, cache.values, cache.table, cache.requests)
    if cache.new == [1] * len(cache.new):
        return decode(original, backend, *args, torch.tensor(cache.lengths), **options)
    spans = (torch.tensor(cache.lengths), torch.tensor(cache.prefix), torch.tensor(cache.new))
    return extend(original, backend, *args, *spans, causal=True, **options)


@settings(max_examples=80, deadline=None)
@given(
    lengths,
    st.sampled_from([(4, 2), (4, 4), (6, 1)]),
    st.sampled_from([8, 5]),
    st.sampled_from([None, 0, 3, 20]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_attention_equals_its_definition(
    shapes: list[tuple[int, int]],
    heads: tuple[int, int],
    value_dim: int,
    window: int | None,
    sinks: bool,
    decoding: bool,
    seed: int,
) -> None:
    if decoding:
        shapes = [(a, 1) for a, _ in shapes]
    cache = Cache(shapes, *heads, 8, seed, value_dim)
    expected = cache.expected(window, sinks)
    got = run(cache, sinks=sinks, sliding_window_size=window)
    assert float((got.double() - expected).abs().max()) <= TOLERANCE
    # Planted: the values' channels in another order.
    cache.values = cache.values.flip(-1)
    assert float((run(cache, sinks=sinks, sliding_window_size=window).double() - expected).abs().max()) >= PLANTED
    cache.values = cache.values.flip(-1)
    # A window one token too wide, and sinks of other heads.
    if window is not None and window + 2 <= max(cache.lengths):
        wider = run(cache, sinks=sinks, sliding_window_size=window + 1).double()
        assert float((wider - expected).abs().max()) >= PLANTED
    if sinks:
        cache.sinks = cache.sinks.roll(1)
        other = run(cache, sinks=True, sliding_window_size=window).double()
        assert float((other - expected).abs().max()) >= PLANTED


def test_groups_of_mixed_lengths_under_a_small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches, and sequences that exceed the bound alone and go to the original."""
    monkeypatch.setattr(cpu_attention, "MERGE_TOKENS", 16)
    shapes = [(3, 2), (40, 1), (0, 7), (90, 5), (12, 3), (41, 2), (200, 3)]
    cache = Cache(shapes, 4, 2, 8, 1)
    alone: list[int] = []

    def bounded(*args: Any, **options: Any) -> Plan:
        return make_plan(*args, max_elements=32 * 120, **options)

    def original(self: Any, query: torch.Tensor, output: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        kv = int(args[4][0])
        alone.append(kv)
        start = sum(cache.new[: cache.lengths.index(kv)])
        output.copy_(cache.expected()[start : start + len(query)].float())
        return output

    monkeypatch.setattr(cpu_backend, "make_plan", bounded)
    assert float((run(cache, original).double() - cache.expected()).abs().max()) <= TOLERANCE
    assert alone == [203]
    # The original knows no sinks: with them nothing is left to it.
    assert float((run(cache, sinks=True).double() - cache.expected(sinks=True)).abs().max()) <= TOLERANCE


def test_sinks_reach_the_loops_and_the_backend_never_sees_them() -> None:
    backend = types.SimpleNamespace()
    sinks = torch.ones(4)

    def original(self: Any, q: int, *, save_kv_cache: bool) -> Any:
        return q, save_kv_cache, self.moe_asyncrl_sinks

    assert take_sinks(original, backend, 1, save_kv_cache=True, sinks=sinks) == (1, True, sinks)
    assert take_sinks(original, backend, 2, save_kv_cache=False) == (2, False, None)


@pytest.mark.parametrize("option", [{"encoder_lens": torch.ones(1)}, {"is_cross_attn": True}])
@pytest.mark.parametrize("new", [1, 3])
def test_special_attention_goes_to_the_original(option: dict[str, Any], new: int) -> None:
    cache = Cache([(5, new)], 4, 2, 8, 0)
    seen: list[dict[str, Any]] = []

    def original(*args: Any, **options: Any) -> torch.Tensor:
        seen.append(options)
        return args[2]

    run(cache, original, **option)
    assert len(seen) == 1


# --- experts -----------------------------------------------------------------------------------------------------


def experts_by_definition(
    x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for k in range(ids.shape[1]):
            if (e := int(ids[t, k])) >= 0:
                gate, up = (w13[e].double() @ x[t].double()).chunk(2)
                out[t] += w[t, k].double() * (w2[e].double() @ (torch.nn.functional.silu(gate) * up))
    return out


@settings(max_examples=30)
@given(st.integers(1, 20), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_experts_equal_their_definition(tokens: int, k: int, remote: bool, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    w13, w2 = torch.randn(6, 10, 8, generator=g) * 0.3, torch.randn(6, 8, 5, generator=g) * 0.3
    x, weights = torch.randn(tokens, 8, generator=g), torch.rand(tokens, k, generator=g)
    ids = torch.stack([torch.randperm(6, generator=g)[:k] for _ in range(tokens)])
    if remote:
        ids = torch.where(torch.rand(tokens, k, generator=g) < 0.5, -1, ids)
    got = grouped_experts(x, weights, ids.int(), w13, w2)
    expected = experts_by_definition(x, weights, ids, w13, w2)
    assert got.dtype == x.dtype and float((got.double() - expected).abs().max()) <= TOLERANCE
    swapped = grouped_experts(x, weights, ids.int(), w13.roll(1, 0), w2)
    if (ids >= 0).any():
        assert float((swapped.double() - expected).abs().max()) >= 100 * TOLERANCE


def test_other_activations_go_to_the_original_unless_experts_are_remote() -> None:
    config = types.SimpleNamespace(activation="gelu", gemm1_alpha=None, apply_router_weight_on_input=False)
    layer, x = types.SimpleNamespace(), torch.ones(1, 4)
    local = types.SimpleNamespace(topk_weights=torch.ones(1, 2), topk_ids=torch.tensor([[0, 1]]))
    assert moe_forward(lambda *args: args[1] * 2, layer, x, local, config).tolist() == [[2.0] * 4]
    remote = types.SimpleNamespace(topk_weights=torch.ones(1, 2), topk_ids=torch.tensor([[0, -1]]))
    with pytest.raises(NotImplementedError, match="gelu"):
        moe_forward(never, layer, x, remote, config)


# --- norms -------------------------------------------------------------------------------------------------------


def test_the_norm_over_all_heads_equals_its_definition() -> None:
    g = torch.Generator().manual_seed(3)
    q, k = torch.randn(5, 24, generator=g), 3 * torch.randn(5, 8, generator=g)
    weights = [1 + torch.randn(n, generator=g) for n in (24, 8)]
    norms = types.SimpleNamespace(
        _q_norm=types.SimpleNamespace(weight=weights[0]),
        _k_norm=types.SimpleNamespace(weight=weights[1]),
        _world_size=1,
        _eps=1e-6,
    )
    for x, weight, got in zip((q, k), weights, norm_over_heads(norms, q, k), strict=True):
        expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        assert float((got.double() - expected).abs().max()) <= TOLERANCE
        each = x.double().view(5, -1, 4)
        by_head = (each / (each.square().mean(-1, keepdim=True) + 1e-6).sqrt()).view(x.shape) * weight.double()
        assert float((got.double() - by_head).abs().max()) >= PLANTED


# --- stand-ins ---------------------------------------------------------------------------------------------------


def test_the_request_table_is_filled() -> None:
    table = torch.zeros(4, 9, dtype=torch.int32)
    start, end = torch.tensor([2, 0, 5]), torch.tensor([4, 0, 8])
    kernel_standin.assign_req_to_token_pool_cpu(
        torch.tensor([3, 1, 0]), table, start, end, torch.tensor([11, 12, 21, 22, 23, 99]), 9
    )
    expected = np.zeros((4, 9), dtype=np.int32)
    expected[3, 2:4] = [11, 12]
    expected[0, 5:8] = [21, 22, 23]
    assert (table.numpy() == expected).all()


def test_launching_a_kernel_that_is_not_there_raises() -> None:
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.moe_sum"):
        kernel_standin.moe_sum(1)
    kernel = standins._jit(do_not_specialize=["x"])(test_the_request_table_is_filled)
    with pytest.raises(standins.StandInError, match="test_the_request_table_is_filled"):
        kernel[(1,)](1)


INSIDE = """
import importlib.metadata, importlib.util, json, os, sys
import moe_asyncrl
entry = [e for e in importlib.metadata.entry_points(group="sglang.srt.plugins") if e.name == "moe_asyncrl"]
found = {}
for name in ("triton", "torchvision", "sgl_kernel"):
    try:
        found[name] = importlib.util.find_spec(name) is not None
    except ValueError:
        found[name] = True
triton = None
if found["triton"]:
    import triton, triton.language as tl
    from triton.runtime.cache import FileCacheManager
    @triton.jit
    def kernel(x: tl.constexpr): pass
    triton = triton.__version__
print(json.dumps({"entry": sorted({e.value for e in entry}), "found": found, "triton": triton,
                  "chained": os.environ.get("CHAINED"), "package": moe_asyncrl.__file__}))
"""


def inside(env: dict[str, str], python: tuple[str, ...] = (sys.executable,)) -> dict[str, Any]:
    """A fresh process, because the plugin's folder must be on the path before Python starts."""
    done = subprocess.run([*python, "-c", INSIDE], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_engine_processes_find_the_plugin_and_others_do_not(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['CHAINED'] = 'yes'\n")
    base = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(tmp_path)}
    args = EngineArgs(model="m", port=1, python=sys.executable)
    cpu = inside(child_environment(base, build_command(args, cpu=True)))
    gpu = inside(child_environment(base, build_command(args, cpu=False)))
    plain = inside({**base, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"})
    assert cpu["entry"] == gpu["entry"] == ["moe_asyncrl.engine.plugin:register"]
    assert all(cpu["found"].values())
    # On a GPU machine only what is really installed is found, as in any other process.
    assert gpu["found"] == plain["found"]
    assert (cpu["triton"] == "3.0.0") is (not plain["found"]["triton"])
    assert cpu["chained"] == gpu["chained"] == plain["chained"] == "yes"
    # Our code, found without being installed or on the path.
    assert cpu["package"] == plain["package"]


def test_registering_outside_an_engine_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_asyncrl.engine.plugin import register

    for mode in (None, "somebody else's"):
        monkeypatch.delenv("MOE_ASYNCRL_ENGINE", raising=False)
        if mode:
            monkeypatch.setenv("MOE_ASYNCRL_ENGINE", mode)
        before = set(sys.modules)
        register()
        assert not {m for m in set(sys.modules) - before if m.startswith("sglang")}
