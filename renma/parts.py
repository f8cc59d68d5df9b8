"""From a recipe's component (`type` and options) to the object it names, checked against the constructor."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from renma.errors import RecipeError
from renma.recipe import Component
from renma.registry import Registry, nearest


def _options(factory: Callable[..., Any], supplied: set[str]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The constructor's parameters that a recipe may set, and whether it takes any others."""
    try:
        parameters = dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        return {}, True
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        name: p
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in supplied
    }
    return named, open_ended


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    target = factory.__init__ if inspect.isclass(factory) else factory
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError):
        return {}  # annotations of a user's own that cannot be resolved: the constructor itself will judge


def checked_options(
    registry: Registry,
    component: Component,
    place: str,
    supplied: set[str] = frozenset(),  # type: ignore[assignment]
) -> dict[str, Any]:
    """The component's options, with their types checked and converted.

    `supplied` are arguments that Renma gives itself (a tokenizer, say). Raises RecipeError naming `place`.
    """
    try:
        factory = registry[component.type]
    except RecipeError as error:
        raise RecipeError(f"{place}: {error}") from None
    if not callable(factory):
        raise RecipeError(f"{place}: {component.type!r} is not something that can be made; name a class or function")
    parameters, open_ended = _options(factory, supplied)
    hints = _hints(factory)
    checked: dict[str, Any] = {}
    for name, value in component.options.items():
        if name not in parameters and not open_ended:
            known = list(parameters)
            hint = nearest(name, known) if known else "it takes no options"
            raise RecipeError(f"{place}.{name}: {component.type!r} has no option {name!r}; {hint}")
        checked[name] = _convert(value, hints.get(name, Any), f"{place}.{name}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in checked:
            raise RecipeError(f"{place}: {component.type!r} needs the option {name!r}; add it beside 'type'")
    return checked


def _convert(value: Any, hint: Any, place: str) -> Any:
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticSchemaGenerationError, PydanticUserError):
        try:
            adapter = TypeAdapter(hint)
        except (PydanticSchemaGenerationError, PydanticUserError):
            return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise RecipeError(f"{place}: {error.errors()[0]['msg'].lower()}, got {value!r}") from None


def build(registry: Registry, component: Component, place: str, **supplied: Any) -> Any:
    """The object that the component names. Of `supplied`, the constructor gets those it has parameters for."""
    options = checked_options(registry, component, place, set(supplied))
    factory = registry[component.type]
    return factory(**fitting(factory, supplied), **options)


def fitting(factory: Callable[..., Any], supplied: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `supplied` that the constructor has a parameter for (by name)."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(supplied)
    return {name: value for name, value in supplied.items() if name in parameters}
