"""The recipes that come with Renma: YAML files in the repository's recipes/, shipped in the package."""

from __future__ import annotations

from pathlib import Path

import yaml

from renma.errors import RecipeError
from renma.registry import nearest


def recipe_folder() -> Path:
    """recipes/ of a source checkout, or the copy inside an installed package."""
    inside = Path(__file__).parent / "shipped_recipes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "recipes"


def shipped() -> dict[str, Path]:
    return {path.stem: path for path in sorted(recipe_folder().glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """A path as given, or the shipped recipe of that name."""
    path = Path(name)
    if path.is_file():
        return path
    known = shipped()
    if name in known:
        return known[name]
    if path.name in {p.name for p in known.values()}:
        return recipe_folder() / path.name
    raise RecipeError(f"there is no recipe {name!r}: give a YAML file, or {nearest(name, list(known))}")


def title(path: Path) -> str:
    """The first comment line of a recipe, which says what it does."""
    first = path.read_text(encoding="utf-8").splitlines()[0] if path.stat().st_size else ""
    if first.startswith("#"):
        return first.lstrip("# ").strip()
    return str(yaml.safe_load(path.read_text(encoding="utf-8")).get("name", path.stem))
