"""Sources in a recipe: preflight, the example recipes, `data show`, and a mixture through a real engine."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from moe_asyncrl.cli import main
from moe_asyncrl.cluster.run_setup import absolute, preflight
from moe_asyncrl.config.load import RecipeError, dump_recipe, load_recipe, parse_recipe
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.tiny import make_tiny_model
from moe_asyncrl.models.tokenizer import Tokenizer
from moe_asyncrl.rollout.preflight import check_data
from moe_asyncrl.rollout.prompts import reward_functions, train_prompts
from tests.engines.fixtures import TestEngine
from tests.rollout.run import hand_run, model_folder, recipe_for, write_jsonl
from tests.rollout.test_role import ends, lines, started

RECIPES = pathlib.Path(__file__).parents[2] / "configs" / "recipes"
PROBLEMS = [{"problem": f"What is {i}/2?", "answer": f"\\frac{{{i}}}{{2}}", "level": i} for i in range(1, 9)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a model, a Parquet file and a saved data set, under the names of the example recipes."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "path" / "to").mkdir(parents=True)
    make_tiny_model(folder / "path" / "to" / "hf-model", "qwen3_moe", 0)
    table = pa.Table.from_pylist(PROBLEMS)
    pq.write_table(table, folder / "path" / "to" / "train.parquet")
    datasets.DatasetDict({"test": datasets.Dataset(table)}).save_to_disk(str(folder / "path" / "to" / "dataset"))
    return folder


@pytest.mark.parametrize("name", ["math", "reasoning"])
def test_the_example_recipes_pass_preflight_as_they_stand(
    name: str, place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    preflight(absolute(recipe, place))
    again = place / "again.yaml"  # as roles read it
    again.write_text(dump_recipe(recipe))
    assert load_recipe(again) == recipe
    assert reward_functions(recipe) == (("math",) if name == "math" else ("reasoning_gym",))


def test_show_prints_what_the_model_will_see(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert main(["data", "show", str(RECIPES / "math.yaml"), "--limit", "2", "--tokenize", "data.shuffle=false"]) == 0
    out = capsys.readouterr().out
    tokenizer = Tokenizer.load(place / "path" / "to" / "hf-model")
    messages = [
        {"role": "user", "content": f"What is 1/2?\n{load_recipe(RECIPES / 'math.yaml').data.train[0].instruction}"}
    ]
    rendered = tokenizer._inner.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer._inner.encode(rendered, add_special_tokens=False)
    assert "source train: 8 prompts, weight 1 (100.0%), reward math" in out
    assert f"[0] path/to/train.parquet[0]  source train  {len(ids)} tokens, answer up to 2048, context 4096" in out
    assert rendered in out and "answer: '\\\\frac{1}{2}'" in out and "level=1" in out
    assert f"tokens: {ids[0]}={tokenizer.decode(ids[:1], keep_special=True)!r} " in out and out.count("\n[1] ") == 1
    assert main(["data", "show", str(RECIPES / "math.yaml"), "--eval", "--limit", "1"]) == 0
    assert "[0] path/to/dataset/test[0]  source dataset" in capsys.readouterr().out
    assert main(["data", "show", "path/to/train.parquet", "prompt_field=problem", "--limit", "1"]) == 0
    assert "What is 1/2?\nanswer: '\\\\frac{1}{2}'" in capsys.readouterr().out
    for arguments, says in (
        (["path/to/train.parquet"], "no column `prompt` or `messages`"),
        (["path/to/train.parquet", "prompt_feld=problem"], "prompt_feld"),
        (["path/to/train.parquet", "--tokenize"], "--tokenize needs a recipe"),
    ):
        assert main(["data", "show", *arguments]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1


def small(model: pathlib.Path, train: Any, **sections: Any) -> Recipe:
    return recipe_for(model, pathlib.Path("unused"), data={"train": train}, **sections)


def test_what_is_refused_before_the_run(place: pathlib.Path) -> None:
    model, path = place / "path" / "to" / "hf-model", str(place / "path" / "to" / "train.parquet")
    fields = {"path": path, "prompt_field": "problem"}
    check_data(small(model, [fields]))
    with pytest.raises(UserError, match=r"train\.parquet\[0\]: the prompt has \d+ tokens; with an answer of up to 250"):
        check_data(small(model, [fields], rollout={"max_new_tokens": 250}))
    with pytest.raises(UserError, match="'no_such_reward' is no built-in reward"):
        check_data(small(model, [fields, {**fields, "name": "b", "reward": "no_such_reward"}]))


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ([{"path": "a", "weight": 0}], "data.train[0].weight: expected `float` > 0.0, found 0"),
        ([{"path": "a"}, {"path": "b", "weigth": 1}], "unknown key 'data.train[1].weigth'; did you mean 'weight'?"),
        ([], "data.train: expected `array` of length >= 1"),
        ([{"path": "a", "reasoning_gym": "b"}], "data.train[0]: give either `path` or `reasoning_gym`; both found"),
        ([{}], "data.train[0]: give either `path` or `reasoning_gym`; neither found"),
        ([{"path": "a", "config": {"x": 1}}], "data.train[0].config: has no meaning beside `path`"),
        ([{"path": "x/a.parquet"}, {"path": "y/a.jsonl"}], "data.train[1]: is called 'a' like source 0"),
        ([{"path": "a", "reward": "reasoning_gym"}], "data.train[0].reward: 'reasoning_gym' scores items of"),
    ],
)
def test_sources_that_contradict_themselves(train: Any, says: str, tmp_path: pathlib.Path) -> None:
    data = {"model": {"path": "m"}, "data": {"train": train}}
    with pytest.raises(RecipeError) as e:
        parse_recipe(data)
    assert says in str(e.value)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(data, sort_keys=True, default_flow_style=False))
    with pytest.raises(RecipeError, match=r"r\.yaml:[1-9]"):  # with the line
        load_recipe(tmp_path / "r.yaml")


def test_a_mixture_through_a_real_engine(fresh: TestEngine, tmp_path: pathlib.Path) -> None:
    """What reaches the trainer: the prompts of the mixture's order, with source and reward; accuracy by source."""
    model = model_folder(fresh.model, tmp_path)
    write_jsonl(tmp_path / "sums.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)])
    pq.write_table(pa.Table.from_pylist(PROBLEMS), tmp_path / "halves.parquet")
    train = [
        {"path": str(tmp_path / "sums.jsonl"), "weight": 1},
        {"path": str(tmp_path / "halves.parquet"), "weight": 1, "prompt_field": "problem", "reward": "math"},
        {"reasoning_gym": "chain_sum", "weight": 2, "config": {"max_terms": 3, "max_digits": 2}},
    ]
    data = {"train": train, "eval": [{**source, "weight": 1} for source in train]}
    r = recipe_for(model, tmp_path, data=data, eval={"every": 0, "max_prompts": 9})
    prompts = train_prompts(r, Tokenizer.load(model))
    order = prompts.order(seed=r.run.seed, shuffle=True)

    async def go() -> tuple[list[list[Any]], list[dict[str, Any]]]:
        async with hand_run(tmp_path, r) as run:
            role = await started(run, r, fresh)
            groups = await run.wait_take(1, 0) + await run.wait_take(2, 0)
            run.phase("finishing")
            assert await ends(role) == 0
            return groups, lines(run, "eval")

    groups, evals = asyncio.run(go())
    rewards = {"sums": "exact", "halves": "math", "chain_sum": "reasoning_gym"}
    assert len(groups) == 8
    for t in (t for group in groups for t in group):
        want = prompts[order.at(t.identity.index)[1]]
        assert t.identity.prompt == want.prompt.source and t.tokens[: len(want.ids)].tolist() == want.ids.tolist()
        name = t.metadata["source_name"]
        assert name == want.prompt.name and set(t.score_status) == {rewards[name]} and "entry" not in t.metadata
        assert t.score_status[rewards[name]].status == "ok" and 0.0 <= t.rewards["total"] <= 1.0
    assert len({t.metadata["source_name"] for group in groups for t in group}) >= 2
    assert set(evals[0]["accuracy_by_source"]) == set(rewards) and evals[0]["n"] == 9


def test_the_reward_of_each_source_in_a_step() -> None:
    from moe_asyncrl.data.wire import encode
    from moe_asyncrl.train.by_source import reward_by_source
    from tests.data.samples import trajectory

    def header(name: str | None, rewards: dict[str, float]) -> Any:
        import dataclasses

        metadata = {} if name is None else {"source_name": name}
        return encode(dataclasses.replace(trajectory(), metadata=metadata, rewards=rewards))[0]

    given = [("a", 1.0), ("b", 0.5), ("a", 0.0), (None, 9.0)]
    headers = [header(name, {"total": total}) for name, total in given] + [header("b", {})]
    assert reward_by_source(headers) == {"a": 0.5, "b": 0.5}
