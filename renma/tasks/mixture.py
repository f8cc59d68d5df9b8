"""Several sources as one, interleaved by weight. Which source gives task i depends on the weights only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from renma.errors import RecipeError
from renma.parts import build
from renma.recipe import Component
from renma.tasks import TASKS
from renma.tasks.base import TaskSource, checked_index
from renma.types import Task


class Mixture:
    """Tasks of several sources in fixed proportions.

    sources: a list of task sources as a recipe writes them (`type`, options) each with a `weight` (1 when left out).
    size: how many tasks the mixture has; the sum of the sources' lengths when None. Any stretch of the mixture holds
    the sources in proportion to their weights, as nearly as whole tasks can. A source that is used up starts again, so
    its tasks may occur more than once; `disjoint` and evaluation see them as they are.
    """

    def __init__(self, *, sources: list[dict[str, Any]], size: int | None = None) -> None:
        if not sources:
            raise RecipeError("mixture: sources is empty; name at least one task source")
        weights = []
        parts: list[TaskSource] = []
        for position, entry in enumerate(sources):
            place = f"mixture.sources.{position}"
            weights.append(_weight(entry, place))
            options = {key: value for key, value in entry.items() if key != "weight"}
            if not isinstance(options.get("type"), str):
                raise RecipeError(f"{place}: 'type' is missing; name a task source")
            parts.append(build(TASKS, Component(**options), place))
        self._parts = tuple(parts)
        self._schedule = interleave(weights, size if size is not None else sum(len(part) for part in parts))

    @classmethod
    def of(cls, sources: Sequence[tuple[TaskSource, float]], size: int | None = None) -> Mixture:
        """A mixture of sources that are already there, each with its weight."""
        mixture = cls.__new__(cls)
        mixture._parts = tuple(source for source, _ in sources)
        total = size if size is not None else sum(len(part) for part in mixture._parts)
        mixture._schedule = interleave([weight for _, weight in sources], total)
        return mixture

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[Task]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Task:
        part, turn = self._schedule[checked_index(index, len(self._schedule))]
        source = self._parts[part]
        return source[turn % len(source)]


def interleave(weights: Sequence[float], size: int) -> list[tuple[int, int]]:
    """[size] pairs (source, its how-many-eth task), the sources as evenly spread as their weights allow.

    Smooth weighted round-robin: every source gains its weight, the richest goes next and pays the total.
    """
    if size < 1 or any(weight < 0 for weight in weights) or sum(weights) <= 0:
        raise RecipeError(f"mixture: needs a size of at least 1 and a weight above 0; got {size} and {list(weights)}")
    credit = [0.0] * len(weights)
    used = [0] * len(weights)
    total = sum(weights)
    schedule = []
    for _ in range(size):
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        richest = max(range(len(weights)), key=lambda i: (credit[i], -i))
        credit[richest] -= total
        schedule.append((richest, used[richest]))
        used[richest] += 1
    return schedule


def _weight(entry: Mapping[str, Any], place: str) -> float:
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight < 0:
        raise RecipeError(f"{place}.weight: must be a number of at least 0, got {weight!r}")
    return float(weight)
