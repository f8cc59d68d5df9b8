"""Which groups are learned from: pure functions from a batch's groups to those kept and those dropped, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from renma.credit.base import moments, returns_of
from renma.errors import RecipeError
from renma.types import Group

Selection = Callable[[Sequence[Group]], tuple[list[Group], list[Group]]]


def starpo_s(keep: float = 0.5) -> Selection:
    """StarPO-S: the share `keep` (0.25 to 0.75) of groups with the highest std of returns, ties by order.

    At least one is kept, and halves round up. Wang et al. 2025 (RAGEN, arXiv 2504.20073). A std that counts as
    zero (see `Moments.uniform`) is zero; a group without a trainable member comes last.
    """
    if not 0.25 <= keep <= 0.75:
        raise RecipeError(f"selection starpo_s: keep must be from 0.25 to 0.75; got {keep}")

    def select(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
        count = max(1, math.floor(keep * len(groups) + 0.5))
        ranked = sorted(range(len(groups)), key=lambda number: -_spread(groups[number]))
        chosen = set(ranked[:count])
        return _divided(groups, lambda number: number in chosen)

    return select


def mixed(metric: Literal["return", "success"] = "return") -> Selection:
    """Dynamic sampling: drops groups whose members all have the same metric, which have nothing to compare.

    Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.2. metric: the return, or whether the task was solved (a return
    above 0.5 where the environment does not say). A group with fewer than two trainable members is dropped.
    """
    if metric not in ("return", "success"):
        raise RecipeError(f"selection mixed: metric must be return or success; got {metric!r}")

    def select(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
        if metric == "success":
            return _divided(groups, lambda number: len({t.solved for t in groups[number].trainable}) > 1)
        return _divided(groups, lambda number: _spread(groups[number]) > 0)

    return select


def _spread(group: Group) -> float:
    """The std of the group's returns, 0 where it counts as zero, -1 where nobody is left."""
    if not group.trainable:
        return -1.0
    own = moments(returns_of(group))
    return 0.0 if own.uniform else own.std


def _divided(groups: Sequence[Group], keep: Callable[[int], bool]) -> tuple[list[Group], list[Group]]:
    kept: list[Group] = []
    dropped: list[Group] = []
    for number, group in enumerate(groups):
        (kept if keep(number) else dropped).append(group)
    return kept, dropped
