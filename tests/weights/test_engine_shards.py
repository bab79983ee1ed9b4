"""What a rank of a server keeps, by our rules, is what SGLang's own models load on that rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_asyncrl.config.recipe import Engine
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.engine.command import EngineArgs, build_command, child_environment
from moe_asyncrl.models.algebra import HfTensor
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny import make_tiny_model
from moe_asyncrl.weights.engine_layout import EngineLayout, check_engine_layout
from moe_asyncrl.weights.engine_shards import cut_of, held_by_engine
from moe_asyncrl.weights.plan_groups import Kind, model_groups
from moe_asyncrl.weights.plan_needs import needs_of
from tests.train.parity_jobs import tiny_spec
from tests.weights.plan_cases import kept, numbered

ROWS = (
    (1, 0, 2, 3, 4, 5, 7, 6, 0, 3),
    (0, 1, 2, 3, 4, 5, 6, 7, 7, 7),
    (7, 6, 5, 4, 3, 2, 1, 0, 1, 2),
    (*range(8), 0, 1),
)
CASES: tuple[tuple[str, EngineLayout], ...] = (
    ("qwen3", EngineLayout(tp=4, attention_dp=2, dp_lm_head=True)),
    ("llama", EngineLayout(tp=4)),
    ("qwen3_moe", EngineLayout(tp=4, ep=4, attention_dp=2, redundant_experts=4)),
    ("qwen3_moe", EngineLayout(tp=4, ep=2, redundant_experts=2, placement=ROWS)),
    ("mixtral", EngineLayout(tp=4, ep=2)),
    ("glm4_moe", EngineLayout(tp=4, ep=2, attention_dp=4, dense_replicated=True)),
    ("glm4_moe", EngineLayout(tp=2, ep=2, placement=(ROWS[2][:8],))),
    ("minimax_m2", EngineLayout(tp=4, ep=2, attention_dp=2, redundant_experts=2)),
    ("minimax_m2", EngineLayout(tp=4)),
    ("gpt_oss", EngineLayout(tp=4, attention_dp=2, dp_lm_head=True)),
    ("deepseek_v3", EngineLayout(tp=4, ep=2, attention_dp=2, redundant_experts=2)),
    ("deepseek_v3", EngineLayout(tp=2, ep=2, attention_dp=2, shared_expert="replicated", dense_replicated=True)),
    ("deepseek_v3", EngineLayout(tp=4, ep=2, redundant_experts=4, shared_expert="fused")),
    ("glm4_moe", EngineLayout(tp=4, ep=2, shared_expert="fused")),
)
"""Every family, every axis, copies and placements of experts, more ranks than key/value heads."""


def server_fields(engine: EngineLayout) -> dict[str, Any]:
    """The fields of SGLang's `ServerArgs` that ask for a layout."""
    found: dict[str, Any] = {"tp_size": engine.tp, "ep_size": engine.ep}
    if engine.attention_dp > 1:
        found["attn_dp_size"] = engine.attention_dp
    if engine.redundant_experts:
        found["ep_num_redundant_experts"] = engine.redundant_experts
    if engine.placement:
        rows = engine.placement if len(engine.placement) > 1 else engine.placement * 4
        found["init_expert_location"] = json.dumps({"physical_to_logical_map": rows})
    if engine.dense_replicated:
        found["moe_dense_tp_size"] = 1
    if engine.dp_lm_head:
        found["enable_dp_lm_head"] = True
    return found


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], dict[str, np.ndarray]]:
    """The models, and what SGLang keeps of them in each case.

    In a fresh process, because the stand-ins for what SGLang imports must be on the path before Python starts.
    """
    home = tmp_path_factory.mktemp("loaders")
    models = {family: home / family for family in dict.fromkeys(family for family, _ in CASES)}
    for family, path in models.items():
        make_tiny_model(path, family, 0)
    cases = [(str(models[family]), engine.shared_expert, server_fields(engine)) for family, engine in CASES]
    (home / "cases.json").write_text(json.dumps(cases))
    command = build_command(EngineArgs(model="m", port=1, python=sys.executable), cpu=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.weights.sglang_loaders", str(home / "cases.json"), str(home / "out.npz")],
        env=child_environment({**os.environ, "PYTHONPATH": os.getcwd()}, command),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(home / "out.npz") as found:
        return models, dict(found)


def needed(spec: ModelSpec, engine: EngineLayout, rank: int) -> np.ndarray:
    """The numbers of what our rules say that a rank keeps, sorted."""
    needs, values = needs_of(spec, engine, "direct"), list(numbered(spec).values())
    rows = np.flatnonzero(needs.rank == rank)
    found = []
    for row in rows:
        value = values[needs.tensor[row]]
        rectangle = tuple(slice(needs.low[row, a], needs.high[row, a]) for a in range(value.ndim))
        found.append(value[rectangle].ravel())
    return np.sort(np.concatenate(found))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{family}-{engine}" for family, engine in CASES])
def test_ranks_keep_what_sglang_loads(number: int, loaded: tuple[dict[str, Path], dict[str, np.ndarray]]) -> None:
    """Element by element, on every rank; the plan tests' own account of the loaders says the same."""
    family, engine = CASES[number]
    models, theirs = loaded
    spec = ModelSpec.from_hf(models[family])
    check_engine_layout(spec, engine)
    for rank in range(engine.tp):
        assert np.array_equal(needed(spec, engine, rank), theirs[f"{number}/{rank}"])
        told = [v[kept(spec, engine, name, v.shape, rank)] for name, v in numbered(spec).items()]
        assert np.array_equal(np.sort(np.concatenate(told)), theirs[f"{number}/{rank}"])


def test_another_rank_or_layout_keeps_something_else(
    loaded: tuple[dict[str, Path], dict[str, np.ndarray]],
) -> None:
    """Planted: a neighbour's share, experts that are not placed so, attention that is not copied."""
    models, theirs = loaded
    for number, (family, engine) in enumerate(CASES):
        spec = ModelSpec.from_hf(models[family])
        assert len(np.setxor1d(needed(spec, engine, 1), theirs[f"{number}/0"])) > 1000
    spec = ModelSpec.from_hf(models["qwen3_moe"])
    for wrong in (EngineLayout(tp=4, ep=2, redundant_experts=2), EngineLayout(tp=4, ep=2, placement=())):
        assert len(np.setxor1d(needed(spec, wrong, 0), theirs["3/0"])) > 1000


def test_a_stack_of_experts_can_lie_anywhere() -> None:
    """Several rectangles of one tensor, by runs of experts; refused for SGLang 0.5.23, which loads whole stacks."""
    spec = tiny_spec(family="gpt_oss", architecture="GptOssForCausalLM", linear_biases=True, moe_layers=(True,) * 4)
    engine = EngineLayout(tp=2, ep=2, placement=((0, 1, 4, 5, 2, 3, 6, 7),))
    with pytest.raises(UserError, match="SGLang lays the experts of gpt_oss out by itself"):
        check_engine_layout(spec, engine)
    (kind,) = (k for k in model_groups(spec).kinds if k.patterns[0].endswith("experts.down_proj"))
    held = held_by_engine(spec, engine, kind, 0)
    runs = [[r[0] for member, r in h.rectangles if member == 0] for h in held]
    assert runs == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("mixtral", {"ep": 2, "redundant_experts": 2}, "no redundant experts for mixtral"),
        ("glm4_moe", {"ep": 2, "redundant_experts": 2}, "no redundant experts for glm4_moe"),
        ("mixtral", {"placement": (tuple(range(8)),)}, "lays the experts of mixtral out by itself"),
        ("mixtral", {"attention_dp": 2}, "no attention data-parallelism for mixtral"),
    ],
)
def test_what_sglang_does_not_have_is_refused(family: str, sizes: dict[str, Any], message: str) -> None:
    spec = tiny_spec(family=family, moe_layers=(True,) * 4)
    with pytest.raises(UserError, match=message):
        check_engine_layout(spec, EngineLayout(tp=2, **sizes))


def test_a_name_that_no_rule_knows_is_refused() -> None:
    spec, tensor = tiny_spec(), HfTensor("model.layers.0.self_attn.indexer.weight", (4,))
    with pytest.raises(UserError, match=r"how SGLang cuts model\.layers\.0\.self_attn\.indexer\.weight .* not known"):
        cut_of(spec, Kind((tensor,), (), per_expert=False, mtp=False), tensor)


def test_a_recipe_without_extra_arguments() -> None:
    assert EngineLayout.of(Engine(tp=2, ep=2)) == EngineLayout(tp=2, ep=2)
