"""Pairs and judged steps, as groups: how they are written, chosen, made noisy and split."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from renma.errors import DataError, RecipeError
from renma.seeding import seed_for
from renma.types import Group, Trajectory

PREFERENCE = "preference"
"""The outcome component of a pair: 1 for the chosen, 0 for the rejected."""
LABEL = "label"
"""The reward component of a judged step: how good it is, 0 to 1. A step without it has not been judged."""

T = TypeVar("T")


@runtime_checkable
class Preferences(Protocol):
    """A source of pairs."""

    async def pairs(self) -> list[Group]:
        """Groups of two: the chosen trajectory (return 1), then the rejected (return 0)."""
        ...


@runtime_checkable
class Judgements(Protocol):
    """A source of judged steps."""

    async def judged(self) -> list[Group]:
        """Groups whose trajectories' steps have a `label` from 0 to 1, or none where nobody judged the step."""
        ...


def pair(chosen: Trajectory, rejected: Trajectory) -> Group:
    """The two as a group. Their own rewards are taken away: what is known of them here is which is better."""
    marked = ((_bare(chosen), 0, 1.0), (_bare(rejected), 1, 0.0))
    members = tuple(replace(t, member=number, rewards={PREFERENCE: value}) for t, number, value in marked)
    return Group(chosen.task, members)


def chosen_and_rejected(group: Group) -> tuple[Trajectory, Trajectory]:
    """The members of a pair, the one with the higher return first.

    Raises DataError when the group has not exactly two trainable trajectories of different return.
    """
    members = group.trainable
    if len(members) != 2 or members[0].ret == members[1].ret:
        returns = ", ".join(f"{t.ret:g}" for t in members)
        raise DataError(
            f"task {group.task.family}/{group.task.id}: a preference is two trajectories with different returns; this "
            f"group has {len(members)} (returns {returns or 'none'})"
        )
    first, second = members
    return (first, second) if first.ret > second.ret else (second, first)


def judged(trajectory: Trajectory, labels: Sequence[float | None]) -> Trajectory:
    """The trajectory with one judgement a step (0 to 1, None: not judged) in place of all its rewards."""
    steps = tuple(
        replace(step, reward={} if label is None else {LABEL: float(label)})
        for step, label in zip(trajectory.steps, labels, strict=True)
    )
    return replace(trajectory, steps=steps, rewards={})


def labels_of(trajectory: Trajectory) -> list[float | None]:
    """[K] the judgement of each step. Raises DataError for one that is not between 0 and 1."""
    labels = [step.reward.get(LABEL) for step in trajectory.steps]
    wrong = [label for label in labels if label is not None and not 0 <= label <= 1]
    if wrong:
        task = trajectory.task
        raise DataError(f"task {task.family}/{task.id}: a step's label is between 0 and 1, got {wrong[0]}")
    return labels


def best_and_worst(group: Group) -> Group | None:
    """The pair of the members with the highest and the lowest return, the first of equals.

    None where nothing is to be learned: all returns are equal, or the two wrote the same.
    """
    members = group.trainable
    if len(members) < 2:
        return None
    best, worst = max(members, key=lambda t: t.ret), min(members, key=lambda t: t.ret)
    if best.ret == worst.ret or transcript_key(best) == transcript_key(worst):
        return None
    return pair(best, worst)


def transcript_key(trajectory: Trajectory, steps: int | None = None) -> Hashable:
    """Equal for trajectories whose first `steps` steps (None: all) have the same prompts and actions."""
    return tuple((step.prompt_ids.tobytes(), step.action_ids.tobytes()) for step in trajectory.steps[:steps])


def with_noise(pairs: Sequence[Group], noise: float, seed: int) -> list[Group]:
    """The pairs, each turned round with probability `noise`, independently of all others."""
    return [
        pair(*reversed(chosen_and_rejected(group))) if flips(noise, seed, group, place) else group
        for place, group in enumerate(pairs)
    ]


def flips(noise: float, seed: int, group: Group, place: int) -> bool:
    """Whether the label at this place is turned round."""
    return random.Random(seed_for(seed, "label noise", group.task.family, group.task.id, place)).random() < noise


def at_most(items: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """`limit` of the items, drawn at random (early and late training alike) and left in their order; None: all."""
    if limit is None or len(items) <= limit:
        return list(items)
    kept = random.Random(seed_for(seed, "subset")).sample(range(len(items)), limit)
    return [items[place] for place in sorted(kept)]


def split(groups: Sequence[Group], held_out: float, seed: int) -> tuple[list[Group], list[Group]]:
    """(to train on, held out): about a share `held_out` of the groups, at least one of two or more.

    Whole tasks are held out, so that a task seen in training is not met again; where there is one task only, groups.
    """
    if not held_out or len(groups) < 2:
        return list(groups), []
    names: list[Hashable] = [(group.task.family, group.task.id) for group in groups]
    if len(set(names)) == 1:
        names = list(range(len(groups)))
    order = sorted(set(names), key=repr)
    random.Random(seed_for(seed, "held out")).shuffle(order)
    wanted = max(1, round(held_out * len(groups)))
    counts = {name: names.count(name) for name in order}
    last = int(np.searchsorted(np.cumsum([counts[name] for name in order]), wanted)) + 1
    outside = set(order[: min(last, len(order) - 1)])
    kept = [group for name, group in zip(names, groups, strict=True) if name not in outside]
    return kept, [group for name, group in zip(names, groups, strict=True) if name in outside]


def check_options(place: str, noise: float, limit: int | None = None) -> None:
    """Raises RecipeError for a noise that is no probability and a limit below 1."""
    if not 0 <= noise <= 1:
        raise RecipeError(f"{place}: noise is a probability between 0 and 1, got {noise}")
    if limit is not None and limit < 1:
        raise RecipeError(f"{place}: max_pairs must be at least 1, got {limit}; leave it out for all")


def _bare(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, steps=tuple(replace(step, reward={}) for step in trajectory.steps))
