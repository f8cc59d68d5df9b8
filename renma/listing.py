"""`renma list`: what Renma has of a kind, one line each."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from renma.agents import PARSERS, RENDERERS
from renma.credit import ESTIMATORS, SELECTIONS
from renma.environments import DEMONSTRATORS, ENVIRONMENTS
from renma.errors import RenmaError
from renma.inference import ENGINES
from renma.learning import CORRECTIONS, LOSSES
from renma.models import MODELS
from renma.preferences import PREFERENCES
from renma.recipes import shipped, title
from renma.registry import Registry, nearest
from renma.rewards import REWARDS
from renma.tasks import TASKS
from renma.training.algorithms import PRESETS, preset

Rows = list[tuple[str, str]]


def of_registry(registry: Registry) -> Rows:
    """Each entry with the first line of its docstring."""
    return [(name, (registry[name].__doc__ or "").strip().split("\n")[0]) for name in registry]


KINDS: dict[str, Callable[[], Rows]] = {
    "environments": lambda: of_registry(ENVIRONMENTS),
    "algorithms": lambda: [(name, preset(name).source) for name in PRESETS],
    "recipes": lambda: [(name, title(path)) for name, path in shipped().items()],
    "models": lambda: [(name, f"{m.description}; {m.licence}; {m.size}") for name, m in sorted(MODELS.items())],
    "tasks": lambda: of_registry(TASKS),
    "rewards": lambda: of_registry(REWARDS),
    "demonstrators": lambda: of_registry(DEMONSTRATORS),
    "renderers": lambda: of_registry(RENDERERS),
    "parsers": lambda: of_registry(PARSERS),
    "engines": lambda: of_registry(ENGINES),
    "estimators": lambda: of_registry(ESTIMATORS),
    "losses": lambda: of_registry(LOSSES),
    "corrections": lambda: of_registry(CORRECTIONS),
    "selections": lambda: of_registry(SELECTIONS),
    "preferences": lambda: of_registry(PREFERENCES),
}


def print_list(kind: str) -> None:
    if kind not in KINDS:
        raise RenmaError(f"renma list knows no {kind!r}; {nearest(kind, list(KINDS))}; kinds: {', '.join(KINDS)}")
    table = Table(title=kind, show_header=False)
    for name, description in KINDS[kind]():
        table.add_row(name, description)
    Console().print(table)
