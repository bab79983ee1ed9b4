"""`moe-asyncrl weights plan`: the layouts that it reads off a recipe, its figures, and a plan for a thousand ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings

from moe_asyncrl.cli import main
from moe_asyncrl.config.recipe import Engine
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.families import family_named
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.published import read_published
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.links import LINKS, Link
from moe_asyncrl.weights.plan_check import check
from moe_asyncrl.weights.plan_figures import figures, send_nbytes
from moe_asyncrl.weights.plan_make import make_plan
from tests.train.parity_jobs import tiny_spec
from tests.weights.plan_cases import plan_cases
from tests.weights.test_plan import MODES, Case

MODELS = Path("configs/models")
RECIPE = "configs/recipes/your-model.yaml"


@settings(max_examples=20, deadline=None)
@given(plan_cases("glm4_moe"))
def test_what_is_sent_is_what_is_received(case: Case) -> None:
    spec, layout, engines, bucket_bytes = case
    whole = sum(t.numel for t in make_plan(spec, layout, engines).tensors) * 4
    for mode in MODES:
        plan = make_plan(spec, layout, engines, mode=mode, dtype="float32", bucket_bytes=bucket_bytes)
        f = figures(plan)
        sent, received = f.sent.mean * f.trainer_ranks, f.received.mean * f.engine_ranks
        assert f.model_bytes == whole and f.largest_bucket <= bucket_bytes
        if mode == "broadcast":
            assert (f.received.min, f.received.max) == (whole, whole) and sent == pytest.approx(whole)
            assert send_nbytes(plan).sum() == whole
            assert f.broadcasts == f.buckets and f.gathered.mean * f.trainer_ranks <= whole
        else:
            assert sent == pytest.approx(received) and f.gathered.max == 0
            assert f.received.max <= whole and f.broadcasts == 0
        assert f.sent.max >= f.sent_at_best * (1 - 1e-9)
        busiest = f.seconds_at_least["25 Gb/s Ethernet"] * 25e9 / 8
        assert busiest >= max(f.sent.max, f.received.max) - 1


def test_the_figures_of_a_plan_that_can_be_counted_by_hand() -> None:
    """Two experts' ranks, two engines of two ranks: attention twice, experts once an engine."""
    spec, layout = tiny_spec(), Layout(dp=2, ep=2)
    plan = make_plan(
        spec, layout, (EngineLayout(tp=2, ep=2, attention_dp=2, dense_replicated=True),) * 2, mode="direct"
    )
    check(plan)
    f = figures(plan)
    experts = 3 * 8 * 3 * 64 * 32 * 2
    head = 259 * 64 * 2
    # The output layer's 259 rows are padded to 320 and cut in halves.
    assert f.received.max == f.model_bytes - experts // 2 - head + 160 * 64 * 2
    assert f.received.min == f.model_bytes - experts // 2 - head + 99 * 64 * 2
    assert f.seconds_at_least["NVLink 4 (450 GB/s)"] == max(f.sent.max, f.received.max) / 450e9
    assert Link("x", 8).seconds(10**9) == 1.0 and sorted(link.gbit_per_s for link in LINKS) == [25, 100, 400, 3600]


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_for_a_thousand_ranks(mode: str) -> None:
    """Kimi-K2 from 1,024 trainer ranks to 512 engine ranks, with copies of experts; the benchmark times it."""
    spec = read_published(MODELS / "kimi-k2.yaml").spec
    layout = Layout(tp=8, pp=8, ep=32, dp=16, stage_layers=(8, 8, 8, 8, 8, 8, 8, 5))
    engines = (EngineLayout(tp=32, ep=32, attention_dp=8, redundant_experts=32),) * 16
    plan = make_plan(spec, layout, engines, mode=mode, bucket_bytes=256 * 2**20)  # type: ignore[arg-type]
    check(plan)
    f = figures(plan)
    assert (f.trainer_ranks, f.engine_ranks) == (1024, 512) and f.largest_bucket <= 256 * 2**20
    assert f.sent.min > 0 and f.sent.max <= f.sent_at_best + 256 * 2**20
    assert f.received.max == f.model_bytes if mode == "broadcast" else f.received.max < f.model_bytes / 25
    source = int(plan.sends.source[0])
    some = [t for _, t in zip(range(50), plan.transfers(source=source), strict=False)]
    assert some and all(t.source == source for t in some)


@pytest.mark.parametrize(
    "name",
    ["llama-3.1-8b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "glm-4.5-air", "gpt-oss-120b", "minimax-m2"],
)
def test_published_sizes_can_be_planned(name: str) -> None:
    """One of each family, for four servers of eight ranks; the largest stands above."""
    spec = read_published(MODELS / f"{name}.yaml").spec
    layers = spec.num_layers
    split = (layers // 2 + layers % 2, layers // 2)
    layout = Layout(tp=4, pp=2, ep=8 if spec.is_moe else 1, dp=4, etp=0, stage_layers=split)
    engines = (EngineLayout(tp=8, ep=8 if spec.is_moe else 1),) * 4
    check(make_plan(spec, layout, engines, mode="direct", bucket_bytes=2**28))


def test_the_engine_layout_of_a_recipe() -> None:
    plain = EngineLayout.of(Engine(tp=4, ep=2))
    assert plain == EngineLayout(tp=4, ep=2) and (plain.attention_tp, plain.moe_tp) == (4, 2)
    words = "--attn-dp-size 2 --ep-num-redundant-experts=6 --moe-dense-tp-size 1 --enable-dp-lm-head"
    args = (*words.split(), "--moe-a2a-backend", "deepep")
    assert EngineLayout.of(Engine(tp=4, ep=2, extra_args=args)) == EngineLayout(
        tp=4,
        ep=2,
        attention_dp=2,
        redundant_experts=6,
        dense_replicated=True,
        dp_lm_head=True,
        shared_expert="replicated",
    )
    old = EngineLayout.of(Engine(tp=4, extra_args=("--dp-size", "2", "--enable-dp-attention")))
    assert old.attention_dp == 2
    with pytest.raises(UserError, match=r"engine\.extra_args: --attn-dp-size has '', not a number"):
        EngineLayout.of(Engine(tp=4, extra_args=("--attn-dp-size",)))
    with pytest.raises(UserError, match="attention_dp 3 does not divide tp 4"):
        EngineLayout(tp=4, attention_dp=3)


def test_trivial_copies_are_sglangs() -> None:
    """`ExpertLocationMetadata.init_trivial`: slot s is expert s modulo the experts; each rank has as many slots."""
    engine = EngineLayout(tp=4, ep=4, redundant_experts=4)
    assert engine.slots(0, 8) == (0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3)
    assert [engine.experts_of(rank, 0, 8) for rank in range(4)] == [(0, 1, 2), (3, 4, 5), (0, 6, 7), (1, 2, 3)]
    assert engine.ep_ranks(0, 8)[:4] == ((0, 2), (0, 3), (0, 3), (1, 3))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["weights", "plan", RECIPE, *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    model = f"model.path={MODELS / 'gpt-oss-20b.yaml'}"
    code, out, err = run(capsys, model, "engine.count=2", "engine.tp=2")
    assert (code, err) == (0, "")
    assert out.startswith("gpt_oss, 39.0 GiB as bfloat16: broadcast from 2 trainer ranks (ep2xdp2)")
    assert all(link.name in out for link in LINKS)
    code, out, err = run(capsys, model, "engine.tp=4", "--mode", "direct", "--json", "engine.ep=2")
    found = json.loads(out)
    assert (code, err, found["mode"], found["engine_ranks"]) == (0, "", "direct", 4)
    assert found["received"]["max"] < found["model_bytes"] / 2


def test_the_command_on_a_model_directory_and_what_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = family_named("qwen3_moe")
    config = {"architectures": [family.architecture], **family.tiny_config, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(capsys, f"model.path={tmp_path}", "--json")[0] == 0
    for words, message in (
        (("engine.tp=3",), "attention_tp 3 is not a multiple of 2 key/value heads"),
        (("trainer.pp=3",), "4 layers do not split evenly"),
        (("engine.extra_args=[--ep-num-redundant-experts,x]",), "--ep-num-redundant-experts has 'x', not a number"),
        ((f"model.path={tmp_path / 'none'}",), "none"),
    ):
        code, out, err = run(capsys, f"model.path={tmp_path}", *words)
        assert (code, out, err.count("\n")) == (2, "", 1) and message in err
