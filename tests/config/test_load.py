"""Recipes: what is accepted, and how a refusal reads."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from moe_asyncrl.config.load import RecipeError, dump_recipe, load_recipe
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.config.schema import field_docs, json_schema, reference

BASE = "model:\n  path: m\ndata:\n  train: t.jsonl\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, text), overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_overrides_win_and_exponents_without_a_point_are_numbers(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, BASE + "optimizer:\n  lr: 1e-5\n"), ["rollout.temperature=0.7", "run.steps=3"])
    assert (recipe.optimizer.lr, recipe.rollout.temperature, recipe.run.steps) == (1e-5, 0.7, 3)


def test_a_resolved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, BASE), ["engine.extra_args=[--log-level, info]", "trainer.etp=1"])
    assert load_recipe(write(tmp_path, dump_recipe(recipe))) == recipe


@pytest.mark.parametrize(
    ("text", "overrides", "parts"),
    [
        (BASE + "rollout:\n  temprature: 1\n", [], [":6:", "'rollout.temprature'", "did you mean 'temperature'"]),
        (BASE + "rolout:\n  temperature: 1\n", [], [":5:", "'rolout'", "did you mean 'rollout'"]),
        (BASE + "rollout:\n  temperature: 0\n", [], [":6:", "rollout.temperature", "> 0", "found 0"]),
        (BASE, ["rollout.temperature=-0.5"], ["override", "rollout.temperature", "-0.5"]),
        (BASE + "rollout:\n  top_p: 1.5\n", [], [":6:", "rollout.top_p", "<= 1", "1.5"]),
        (BASE + "run:\n  steps: many\n", [], [":6:", "run.steps", "int", "'many'"]),
        (BASE + "weights:\n  interrupt: hope\n", [], [":6:", "weights.interrupt", "hope"]),
        (BASE + "engine:\n  tp: 2\n  ep: 3\n", [], [":7:", "engine.ep", "divide"]),
        (BASE + "trainer:\n  ep: 2\n", [], [":6:", "trainer.ep", "divide"]),
        (BASE + "trainer:\n  vpp: 2\n", [], [":6:", "trainer.vpp", "trainer.pp"]),
        (BASE + "rollout:\n  top_k: 1\n", [], [":6:", "rollout.top_k", "no choice"]),
        (BASE + "rollout:\n  group_size: 1\n", [], [":6:", "rollout.group_size", "2"]),
        (BASE, ["rollout.max_new_tokens=1024"], ["rollout.max_new_tokens", "no room for a prompt"]),
        (BASE, ["buffer.capacity_groups=1"], ["buffer.capacity_groups", "batch"]),
        (BASE, ["algorithm.kl_coef=-0.1"], ["algorithm.kl_coef", ">= 0", "-0.1"]),
        (BASE, ["algorithm.kl_estimator=k4"], ["algorithm.kl_estimator", "k4"]),
        (BASE, ["algorithm.objective=sft", "algorithm.kl_coef=0.1"], ["algorithm.kl_coef", "supervised"]),
        (BASE, ["algorithm.objective=sft", "model.reference=x"], ["model.reference", "supervised"]),
        (BASE, ["weights.every=9"], ["weights.every", "starve"]),
        (BASE, ["weights.timeout_s=301"], ["trainer.timeout_s", "600", "twice weights.timeout_s (301)"]),
        (BASE, ["steps=3"], ["section.field=value"]),
        (BASE, ["run.steps=[1"], ["not valid YAML"]),
        ("model: {}\ndata: {train: t}\n", [], [":1:", "model.path"]),
        ("model: [\n", [], [":2:", "not valid YAML"]),
        ("- 1\n", [], ["sections"]),
    ],
)
def test_a_refusal_names_place_field_and_what_would_be_right(
    tmp_path: Path, text: str, overrides: list[str], parts: list[str]
) -> None:
    message = refused(tmp_path, text, *overrides)
    for part in parts:
        assert part in message, message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"none\.yaml: no such recipe file"):
        load_recipe(tmp_path / "none.yaml")


def test_every_field_has_a_sentence_a_default_or_is_required_and_numbers_have_bounds() -> None:
    docs = field_docs()
    definitions = json_schema()["$defs"]
    for section in msgspec.structs.fields(Recipe):
        name = section.type.__name__
        for field, prop in definitions[name]["properties"].items():
            assert docs[name].get(field, "").endswith("."), f"{name}.{field} has no sentence"
            for kind in prop.get("anyOf", [prop]):
                if kind.get("type") in ("integer", "number"):
                    assert {"minimum", "exclusiveMinimum"} & set(kind), f"{name}.{field} has no lower bound"
            assert f"  {field}: " in reference()


def test_recipes_that_come_with_the_project_load() -> None:
    recipes = sorted((Path(__file__).parents[2] / "configs" / "recipes").glob("*.yaml"))
    assert recipes
    for path in recipes:
        load_recipe(path)
