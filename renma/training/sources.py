"""What `renma eval` and `renma rollout` are pointed at: a run, a recipe or a model, opened as a recipe's parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from renma.errors import RecipeError, RunError
from renma.recipe import Recipe
from renma.recipe_checks import check_recipe
from renma.recipe_load import apply_override, read_yaml, validate
from renma.recipes import find_recipe, shipped
from renma.training.checkpoints import latest_checkpoint
from renma.training.run_folder import RunFolder
from renma.training.setup import Parts, assemble
from renma.training.state import POLICY


def open_source(source: str, recipe: str | None, overrides: Sequence[str], settings: dict[str, Any]) -> Parts:
    """The parts for a run folder (its last checkpoint), a recipe (its untrained policy), or a model with a recipe.

    settings: dotted keys set before the user's overrides (evaluation.k, say). Raises RenmaError with the fix.
    """
    path = Path(source)
    policy_folder: Path | None = None
    if (path / "recipe.yaml").is_file():
        checkpoint = latest_checkpoint(RunFolder.open(path))
        if checkpoint is None:
            raise RunError(f"the run {source} has no checkpoint yet; let it train, or `renma resume {source}`")
        policy_folder = checkpoint[1] / POLICY
        tree = read_yaml(find_recipe(recipe) if recipe else path / "recipe.yaml")
    elif recipe is not None:
        tree = read_yaml(find_recipe(recipe))
        tree["model"] = {**_kept_model_keys(tree), "type": "pretrained", "source": source}
    elif path.suffix == ".yaml" or source in shipped():
        tree = read_yaml(find_recipe(source))
    else:
        raise RecipeError(f"{source!r} is no run and no recipe; for a model, name the recipe too: --recipe NAME")
    for key, value in settings.items():
        apply_override(tree, f"{key}={value}")
    for override in overrides:
        apply_override(tree, override)
    checked: Recipe = validate(tree, source)
    check_recipe(checked)
    return assemble(checked, policy_folder=policy_folder)


def _kept_model_keys(tree: dict[str, Any]) -> dict[str, Any]:
    """Of the recipe's model section, what holds for another model too."""
    model = tree.get("model") or {}
    return {key: model[key] for key in ("dtype", "device", "output_tokens") if key in model}
