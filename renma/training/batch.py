"""From a batch of groups to what the learner takes: which groups, with what credit, as which rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from renma.credit import Credit, Evidence, credit
from renma.credit.whitening import task_normalised
from renma.learning.losses.kl import k1
from renma.learning.rows import Row, rows_of
from renma.profiling import span, timed
from renma.training.algorithms import Algorithm
from renma.training.judges import Judges
from renma.types import Floats, Group, Trajectory


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was gathered for one training step.

    groups: everything the policy sampled, in the order of tasks. greedy: for each group a greedy trajectory of its
    task, where the algorithm needs one. demonstrations: groups of one, written rather than sampled, learned from
    besides. refills: rounds of fresh tasks. next_position: the place in the run's order of tasks after this batch.
    written: the groups were not sampled by the policy at all: demonstrations or recorded pairs.
    """

    groups: Sequence[Group]
    greedy: Sequence[Trajectory] = ()
    demonstrations: Sequence[Group] = ()
    refills: int = 0
    next_position: int = 0
    seconds: float = 0.0
    written: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """groups: those that are learned from, and `credit` for their trainable trajectories. rows: what the learner takes,
    in group order, then the demonstrations'; `Row.trajectory` counts trajectories over the batch. reference: for each
    row the starting policy's log-probabilities [trained tokens], where they are needed. critic_rows and values, targets
    for each of them [trained tokens]: what the critic learns from. dropped: groups left out, by reason."""

    groups: tuple[Group, ...]
    credit: Credit
    rows: list[Row]
    reference: list[Floats] | None = None
    critic_rows: list[Row] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)
    targets: list[Floats] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)


def learnable(
    groups: Sequence[Group], algorithm: Algorithm, drop_groups_with: Sequence[str] = ()
) -> tuple[list[Group], Counter[str]]:
    """The groups that can be learned from, and the others counted by reason.

    A group with a member that stopped for one of `drop_groups_with` is dropped whole: what is left of it would be
    biased towards whatever did not fail. So is one with fewer members left than the estimator compares
    (`too_few_members`), and one that the algorithm's selection leaves out (`not_selected`).
    """
    kept: list[Group] = []
    dropped: Counter[str] = Counter()
    for group in groups:
        bad = next((t.stop_reason for t in group.trajectories if t.stop_reason in drop_groups_with), None)
        if bad is not None:
            dropped[bad] += 1
        elif len(group.trainable) < max(1, algorithm.min_group_size):
            dropped["too_few_members"] += 1
        else:
            kept.append(group)
    if algorithm.select is not None and kept:
        kept, left_out = algorithm.select(kept)
        if left_out:
            dropped["not_selected"] += len(left_out)
    return kept, dropped


@timed("credit")
def make_batch(
    sampled: Sampled, algorithm: Algorithm, *, drop_groups_with: Sequence[str] = (), judges: Judges | None = None
) -> Batch:
    """Keep the groups that can be learned from, credit their trajectories, make the rows.

    Of preference pairs and demonstrations the actions were written, so their log-probabilities may be missing.
    """
    asked = judges or Judges()
    kept, dropped = learnable(sampled.groups, algorithm, drop_groups_with)
    greedy, kept = _greedy_returns(sampled, kept, dropped)
    trajectories = [(number, t) for number, group in enumerate(kept) for t in group.trainable]
    with span("rows"):
        blank = [
            rows_of(t, i, group=number, demonstration=sampled.written) for i, (number, t) in enumerate(trajectories)
        ]
    flat = [row for rows in blank for row in rows]
    reference = asked.reference.logprobs(flat) if asked.reference is not None else None
    teacher = asked.teacher.logprobs(flat) if asked.teacher is not None else None
    values, final = asked.critic.state_values(kept, flat) if asked.critic is not None else (None, None)
    penalties = None
    if algorithm.kl and algorithm.kl_form == "k1_reward" and reference is not None:
        penalties = [
            -algorithm.kl * k1(row.logprobs[row.trained], ref) for row, ref in zip(flat, reference, strict=True)
        ]
    evidence = Evidence(
        values=_by_group(kept, flat, values),
        final=final,
        greedy=greedy,
        teacher=_by_group(kept, flat, teacher),
        penalties=_by_group(kept, flat, penalties),
    )
    found = credit(algorithm.advantage, kept, evidence)
    if algorithm.task_normalisation:
        found = replace(found, advantages=task_normalised(found.advantages, kept))
    rows, origin = _with_advantages(blank, trajectories, found, algorithm)
    extra = [
        row
        for i, t in enumerate(t for group in sampled.demonstrations for t in group.trainable)
        for row in rows_of(
            t, len(trajectories) + i, np.ones(t.sampled_tokens, np.float32), group=len(kept) + i, demonstration=True
        )
    ]
    if reference is not None:
        reference = [reference[i] for i in origin]
        if extra and asked.reference is not None:
            reference += asked.reference.logprobs(extra)
    return Batch(
        tuple(kept),
        found,
        rows + extra,
        reference,
        flat if values is not None else [],
        values or [],
        _by_row(blank, found.targets) if found.targets is not None else [],
        dict(dropped),
    )


def _greedy_returns(
    sampled: Sampled, kept: list[Group], dropped: Counter[str]
) -> tuple[list[float] | None, list[Group]]:
    """The greedy return of each kept group's task; a group whose greedy trajectory failed has no baseline and goes."""
    if not sampled.greedy:
        return None, kept
    greedy = {id(group): t for group, t in zip(sampled.groups, sampled.greedy, strict=True)}
    usable = [group for group in kept if greedy[id(group)].trainable]
    if len(usable) < len(kept):
        dropped["greedy_failed"] += len(kept) - len(usable)
    return [greedy[id(group)].ret for group in usable], usable


def _by_group(
    groups: Sequence[Group], rows: Sequence[Row], values: Sequence[Floats] | None
) -> list[list[Floats]] | None:
    """One array [trained tokens] a row -> one array [sampled tokens] a trajectory, by group.

    A trajectory's rows are in the order of its steps and each sampled token is in one of them, so they only join up.
    """
    if values is None:
        return None
    parts: dict[int, list[Floats]] = {}
    for row, array in zip(rows, values, strict=True):
        parts.setdefault(row.trajectory, []).append(array)
    joined = iter(
        np.concatenate(parts[i]).astype(np.float32, copy=False)
        for i in range(sum(len(group.trainable) for group in groups))
    )
    return [[next(joined) for _ in group.trainable] for group in groups]


def _by_row(blank: Sequence[Sequence[Row]], per_token: Sequence[Sequence[Floats]]) -> list[Floats]:
    """The inverse of `_by_group`."""
    found: list[Floats] = []
    for rows, values in zip(blank, (array for group in per_token for array in group), strict=True):
        start = 0
        for row in rows:
            end = start + int(np.count_nonzero(row.trained))
            found.append(values[start:end])
            start = end
    return found


@timed("rows")
def _with_advantages(
    blank: Sequence[Sequence[Row]], trajectories: Sequence[tuple[int, Trajectory]], found: Credit, algorithm: Algorithm
) -> tuple[list[Row], list[int]]:
    """The rows that get a loss, with their advantages, and the number of each among all rows."""
    rows: list[Row] = []
    origin: list[int] = []
    shares = iter(_by_row(blank, found.advantages))
    arrays = (array for group in found.advantages for array in group)
    number = 0
    for own, (_, trajectory), array in zip(blank, trajectories, arrays, strict=True):
        out = (algorithm.mask_truncated and trajectory.status == "truncated") or (
            algorithm.skip_zero and not array.any()
        )
        for row in own:
            share = next(shares)
            if not out:
                advantages = np.zeros(len(row), np.float32)
                advantages[row.trained] = share
                rows.append(replace(row, advantages=advantages))
                origin.append(number)
            number += 1
    return rows, origin
