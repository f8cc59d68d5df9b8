"""Reading a recipe: YAML, `key=value` overrides, and messages that name the place and the fix."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from renma.errors import RecipeError
from renma.recipe import Recipe
from renma.registry import nearest


def load_recipe(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """A checked recipe from a YAML file or a mapping, with `section.key=value` overrides applied.

    Raises RecipeError (one line a mistake) before anything else starts.
    """
    if isinstance(source, Mapping):
        tree, name = _copy(source), "recipe"
    else:
        path = Path(source)
        tree, name = read_yaml(path), str(path)
    for override in overrides:
        apply_override(tree, override)
    return validate(tree, name)


def read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RecipeError(f"there is no recipe {str(path)!r}; `renma list recipes` shows those that come with Renma")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _loader(path.parent))  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise RecipeError(f"{path} is not YAML{where}: {getattr(error, 'problem', error)}") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path} holds no recipe: a mapping with 'model', 'tasks' and 'environment' is needed")
    return tree


def _loader(folder: Path) -> type[yaml.SafeLoader]:
    """YAML with one tag more: `!file NAME` is the text of a file beside the recipe: a loaded recipe is whole."""

    class Loader(yaml.SafeLoader):
        pass

    def text_of(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
        file = folder / str(loader.construct_scalar(node))
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"!file {file} cannot be read: {error}; give a UTF-8 file beside the recipe") from None

    Loader.add_constructor("!file", text_of)
    return Loader


def validate(tree: Mapping[str, Any], name: str = "recipe") -> Recipe:
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        lines = [_message(item) for item in error.errors()]
        raise RecipeError(f"{name}: " + "; ".join(lines)) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML; loading it again gives an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one leaf: `training.steps=50`, `rewards.0.weight=2`, `model.lora=null`. The value is read as YAML."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise RecipeError(f"override {override!r} is not of the form section.key=value")
    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        value = text
    if isinstance(value, str):
        value = _number(value)
    node: Any = tree
    pieces = key.split(".")
    for position, piece in enumerate(pieces):
        last = position == len(pieces) - 1
        here = ".".join(pieces[: position + 1])
        if isinstance(node, list):
            if not piece.isdigit() or int(piece) >= len(node):
                raise RecipeError(f"override {override!r}: {here!r} is no entry; the list has {len(node)}, from 0")
            if last:
                node[int(piece)] = value
            else:
                node = node[int(piece)]
        elif isinstance(node, dict):
            if last:
                node[piece] = value
            else:
                if node.get(piece) is None:
                    node[piece] = {}
                node = node[piece]
        else:
            raise RecipeError(f"override {override!r}: {here!r} lies below a value, not a section")


def _number(text: str) -> Any:
    """YAML reads 1e-5 as text; an override means the number."""
    try:
        return float(text)
    except ValueError:
        return text


def _copy(tree: Any) -> Any:
    if isinstance(tree, BaseModel):
        return tree.model_dump(mode="json")
    if isinstance(tree, Mapping):
        return {key: _copy(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_copy(value) for value in tree]
    return tree


def _message(item: Any) -> str:
    place, section = _place(item["loc"])
    kind = item["type"]
    if kind == "extra_forbidden" and section is not None:
        key = place.rsplit(".", 1)[-1]
        return f"unknown key {place!r}; {nearest(key, list(section.model_fields))}"
    if kind == "missing":
        return f"{place!r} is missing"
    if kind == "union_tag_not_found":
        return f"{place!r} needs a 'type'; {item['msg'].lower()}"
    if kind == "union_tag_invalid":
        context = item["ctx"]
        return f"{place}.type: unknown {context['tag']!r}; known: {context['expected_tags']}"
    return f"{place}: {item['msg'].lower()}, got {item['input']!r}"


def _place(loc: tuple[Any, ...]) -> tuple[str, type[BaseModel] | None]:
    """The dotted key a user wrote, and the section it lies in. Union tags are left out of the key."""
    names: list[str] = []
    section: type[BaseModel] | None = Recipe
    candidates: list[type[BaseModel]] = [Recipe]
    for piece in loc:
        tagged = [c for c in candidates if len(candidates) > 1 and _tag(c) == piece]
        if tagged:
            candidates, section = tagged, tagged[0]
            continue
        names.append(str(piece))
        field = next((c.model_fields[piece] for c in candidates if piece in c.model_fields), None)
        if field is None:
            if isinstance(piece, int):
                continue
            break
        inner = _models(field.annotation)
        section = candidates[0] if not inner else inner[0]
        if inner and piece != loc[-1]:
            candidates = inner
    return ".".join(names), candidates[0] if candidates else section


def _tag(model: type[BaseModel]) -> Any:
    field = model.model_fields.get("type")
    return field.default if field is not None else None


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The sections in an annotation such as `list[A]`, `A | None` or `Annotated[A | B, …]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list, typing.Annotated, tuple):
        return [m for argument in typing.get_args(annotation) for m in _models(argument)]
    return []
