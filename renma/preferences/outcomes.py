"""Judgements of steps from nothing but how episodes ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace

from renma.errors import DataError
from renma.preferences.base import flips, judged, transcript_key
from renma.types import Group, Trajectory


def from_outcomes(
    groups: Sequence[Group], *, threshold: float | None = None, noise: float = 0.0, seed: int = 0
) -> list[Group]:
    """Each group's trainable trajectories with every step labelled by what became of it.

    A step's label is the share of solved attempts among the group's members that share all steps up to it, itself
    among them: a Monte-Carlo estimate of the chance to solve the task from there (Wang et al. 2024, Math-Shepherd, the
    soft estimation of section 3.2, with the group's own members as the completions).

    threshold: an attempt with at least this return is solved; None: what its `success` says. noise: the probability
    that an attempt's outcome is turned round before it is counted. Raises DataError where an outcome is not known.
    """
    return [_labelled(group, threshold, noise, seed, place) for place, group in enumerate(groups) if group.trainable]


def _labelled(group: Group, threshold: float | None, noise: float, seed: int, place: int) -> Group:
    members = group.trainable
    outcomes: dict[Hashable, list[bool]] = defaultdict(list)
    for number, trajectory in enumerate(members):
        turned = flips(noise, seed, group, place * len(members) + number)
        solved = _solved(trajectory, threshold) != turned
        for count in range(1, len(trajectory.steps) + 1):
            outcomes[transcript_key(trajectory, count)].append(solved)

    def labels(trajectory: Trajectory) -> list[float]:
        shared = (outcomes[transcript_key(trajectory, count + 1)] for count in range(len(trajectory.steps)))
        return [sum(solved) / len(solved) for solved in shared]

    return replace(group, trajectories=tuple(judged(t, labels(t)) for t in members))


def _solved(trajectory: Trajectory, threshold: float | None) -> bool:
    if threshold is not None:
        return trajectory.ret >= threshold
    if trajectory.success is None:
        raise DataError(
            f"task {trajectory.task.family}/{trajectory.task.id} member {trajectory.member}: its environment does not "
            "say whether it is solved; set threshold, the return from which on it counts as solved"
        )
    return trajectory.success
