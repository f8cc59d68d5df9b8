"""What a recipe says of its situation; what it does not say is left unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from renma.advice.situation import parameters
from renma.errors import RecipeError
from renma.models.known import MODELS
from renma.recipe import Recipe, ScratchModel

JUDGES = {"reward_model": "sparse", "process_reward_model": "process"}  # rewards that are no verifiers -> their kind


def inputs_of(recipe: Recipe, max_turns: int) -> dict[str, Any]:
    """Inputs of a `Situation` that the recipe settles. max_turns: the most actions of one of its episodes."""
    judges = [JUDGES[reward.type] for reward in recipe.rewards if reward.type in JUDGES]
    inputs: dict[str, Any] = {
        "horizon": max_turns,
        "group_size": recipe.rollout.group_size,
        "staleness": recipe.training.staleness,
        "tokens": max_turns * recipe.sampling.max_tokens,
        "model_size": _model_size(recipe),
        "teacher": True if recipe.teacher is not None else None,
        "demonstrations": True if recipe.cold_start is not None else None,
        "families": _families(recipe),
    }
    if judges:
        inputs |= {"verifiable": False, "reward": "process" if "process" in judges else "sparse"}
    elif recipe.rewards:
        inputs |= {"verifiable": True}
    if recipe.reward_model is not None and recipe.reward_model.form == "outcome":
        inputs |= {"reward": "preference"}
    if recipe.preferences is not None:
        inputs |= {"reward": "preference", "online": recipe.algorithm.learns_from != "preferences"}
    return inputs


def max_turns_of(recipe: Recipe) -> int:
    """The most actions of an episode: the recipe's own limit, or that of its environment, which is made for a look."""
    if recipe.rollout.max_turns is not None:
        return recipe.rollout.max_turns
    from renma.training.setup import check_environment, environment_maker

    return check_environment(environment_maker(recipe)(), recipe)


def _model_size(recipe: Recipe) -> float | None:
    model = recipe.model
    if isinstance(model, ScratchModel):
        layer = 4 * model.hidden**2 + 3 * model.hidden * model.feed_forward
        return float(model.layers * layer + model.vocabulary * model.hidden)
    known = MODELS.get(model.source)
    if known is None:
        return None
    try:
        return parameters(known.parameters)
    except RecipeError:  # a size in words
        return None


def _families(recipe: Recipe) -> int | None:
    """How many sources a mixture has; None for another kind of tasks."""
    sources = recipe.tasks.options.get("sources")
    if isinstance(sources, Mapping | list) and sources:
        return len(sources)
    return None
