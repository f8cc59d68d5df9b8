"""Recipes: loading, overrides, and messages that name the place and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from renma.errors import RecipeError
from renma.recipe import Recipe
from renma.recipe_checks import check_recipe, derived_facts
from renma.recipe_load import dump_recipe, load_recipe
from renma.recipes import shipped

BASE: dict[str, Any] = {
    "model": {"type": "scratch"},
    "tasks": {"type": "arithmetic"},
    "environment": {"type": "calculator"},
}


def test_overrides_are_read_as_yaml_and_reach_any_leaf() -> None:
    recipe = load_recipe(BASE, ["training.steps=7", "learner.learning_rate=1e-5", "model.lora.rank=4", "name=hi"])
    assert recipe.training.steps == 7
    assert recipe.learner.learning_rate == 1e-5
    assert recipe.model.lora is not None and recipe.model.lora.rank == 4
    assert recipe.name == "hi"


def test_override_of_a_list_entry() -> None:
    tree = {**BASE, "rewards": [{"type": "success", "weight": 1.0}]}
    assert load_recipe(tree, ["rewards.0.weight=2"]).rewards[0].options["weight"] == 2
    with pytest.raises(RecipeError, match="the list has 1"):
        load_recipe(tree, ["rewards.3.weight=2"])


def test_dump_and_load_give_an_equal_recipe() -> None:
    recipe = load_recipe(BASE, ["training.steps=7", "learner.mini_batch=8"])
    assert load_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainin.steps=7", "unknown key 'trainin'; did you mean 'training'"),
        ("training.stesp=7", "unknown key 'training.stesp'; did you mean 'steps'"),
        ("model.layerz=7", "did you mean 'layers'"),
        ("model.lora.rnk=7", "did you mean 'rank'"),
        ("training.steps=a", "training.steps: input should be a valid integer"),
        ("training.steps=-1", "training.steps"),
        ("model.type=foo", "known: 'pretrained', 'scratch'"),
        ("training", "is not of the form section.key=value"),
        ("training.steps.deep=3", "training.steps"),
        ("evaluation.sets=[{name: a}]", "'evaluation.sets.0.source' is missing"),
    ],
)
def test_a_mistake_is_named_with_its_place(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(BASE, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tasks.type=arithmetik", "did you mean 'arithmetic'"),
        ("tasks.max_trems=3", "did you mean 'max_terms'"),
        ("tasks.max_terms=many", "tasks.max_terms"),
        ("environment.type=nowhere.module:Thing", "cannot be imported"),
        ("rollout.group_size=1", "rollout.group_size must be >= 2 for grpo"),
        ("sampling.temperature=0", "greedy"),
        ("sampling.top_p=0.9", "leave top_p at its default"),
        ("algorithm.preset=grop", "did you mean 'grpo'"),
    ],
)
def test_contradictions_and_unknown_parts_are_found_before_anything_starts(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_recipe(load_recipe(BASE, [override]))
    assert message in str(caught.value)


def test_case_9_1_batch_sizes_are_derived_and_divisibility_is_explained() -> None:
    overrides = ["rollout.tasks_per_step=4", "rollout.group_size=3", "learner.mini_batch=8"]
    with pytest.raises(RecipeError) as caught:
        check_recipe(load_recipe(BASE, overrides))
    assert "12 trajectories per step; mini_batch 8 does not divide 12; use 1,2,3,4,6,12" in str(caught.value)
    facts = dict(derived_facts(load_recipe(BASE, [*overrides[:2], "learner.mini_batch=4"])))
    assert facts["trajectories per step"] == "4 tasks x 3 members = 12"
    assert facts["optimiser steps per step"] == "3"


def test_case_2_18_a_group_of_one_is_refused_at_load() -> None:
    with pytest.raises(RecipeError, match="must be >= 2 for rloo"):
        check_recipe(load_recipe(BASE, ["algorithm.preset=rloo", "rollout.group_size=1"]))


def test_case_6_7_asynchronous_training_needs_the_recorded_logprobs() -> None:
    with pytest.raises(RecipeError, match="old_logprobs: behaviour"):
        check_recipe(load_recipe(BASE, ["training.staleness=2", "algorithm.old_logprobs=recompute"]))


def test_a_file_that_is_no_recipe(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("model: [unclosed")
    with pytest.raises(RecipeError, match="is not YAML at line"):
        load_recipe(bad)
    bad.write_text("just text")
    with pytest.raises(RecipeError, match="holds no recipe"):
        load_recipe(bad)
    with pytest.raises(RecipeError, match="there is no recipe"):
        load_recipe(tmp_path / "absent.yaml")


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_recipe_is_sound(name: str) -> None:
    recipe = load_recipe(shipped()[name])
    check_recipe(recipe)
    assert isinstance(recipe, Recipe)
