"""From a trajectory to the token rows that are trained: the exact ids the policy saw and sampled, and nothing else.

Consecutive steps whose prompt begins with all that came before merge into one row; where the prompt was rewritten a new
row begins, so no position is ever trained in a context the policy did not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from renma.errors import RunError
from renma.types import Floats, Ids, Routing, Step, Trajectory


class UntrainableTrajectory(RunError):
    """A failed or aborted trajectory was given to be trained."""


class MissingLogprobs(RunError):
    """A sampled token has no recorded log-probability."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of T tokens.

    ids [T] int32. trained [T] bool: exactly the sampled tokens. logprobs [T] float32: the behaviour policy's, 0 where
    not trained (NaN at the trained tokens of a demonstration that has none). advantages [T] float32, 0 where not
    trained.
    step, versions [T] int32: the step and policy version of each sampled token, -1 where not trained.
    trajectory: which trajectory of the batch. group: which group of the batch, -1 where the trajectory stands alone.
    routing [T, layers, k] int16: the experts chosen at each position when it was sampled, -1 where none is recorded;
    None for a dense policy.
    """

    ids: Ids
    trained: NDArray[np.bool_]
    logprobs: Floats
    advantages: Floats
    step: Ids
    versions: Ids
    trajectory: int
    group: int = -1
    routing: Routing | None = None

    def __post_init__(self) -> None:
        parts = (self.ids, self.trained, self.logprobs, self.advantages, self.step, self.versions)
        if len({len(part) for part in parts}) != 1:
            raise ValueError(f"a row's arrays must have one length; got {[len(part) for part in parts]}")
        if len(self.trained) and self.trained[0]:
            raise ValueError("the first token of a row cannot be trained: nothing comes before it to predict it from")

    def __len__(self) -> int:
        return len(self.ids)


def rows_of(
    trajectory: Trajectory,
    index: int,
    advantages: Floats | None = None,
    *,
    group: int = -1,
    demonstration: bool = False,
) -> list[Row]:
    """The rows of one trajectory; a row without a sampled token is left out.

    index: the trajectory's number in the batch. advantages [n] float32: one for each sampled token, all steps
    concatenated; None: zeros. group: its group's number in the batch; batches are split into optimiser steps by group.
    demonstration: the actions were written, not sampled, so log-probabilities may be missing (NaN).

    Raises UntrainableTrajectory for a failed or aborted trajectory; MissingLogprobs when a sampled token has none;
    ValueError when there is not one advantage for each sampled token.
    """
    _check(trajectory, demonstration)
    total = trajectory.sampled_tokens
    values = np.zeros(total, np.float32) if advantages is None else np.asarray(advantages, dtype=np.float32)
    if values.shape != (total,):
        raise ValueError(f"{_name(trajectory)}: {total} sampled tokens need as many advantages; got {values.shape}")
    rows: list[Row] = []
    run: list[int] = []
    for number, step in enumerate(trajectory.steps):
        if run and not step.goes_on_from(trajectory.steps[number - 1]):
            rows.extend(_row(trajectory, run, values, index, group))
            run = []
        run.append(number)
    rows.extend(_row(trajectory, run, values, index, group))
    return rows


def _row(trajectory: Trajectory, run: Sequence[int], values: Floats, index: int, group: int) -> list[Row]:
    """The row of the steps numbered in `run`, each of whose prompts extends the one before."""
    steps = trajectory.steps
    if not any(len(steps[number].action_ids) for number in run):
        return []
    last = steps[run[-1]]
    ids = np.concatenate([last.prompt_ids, last.action_ids]).astype(np.int32, copy=False)
    trained = np.zeros(len(ids), np.bool_)
    logprobs, advantages = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
    step_of, versions = np.full(len(ids), -1, np.int32), np.full(len(ids), -1, np.int32)
    offset = sum(len(step.action_ids) for step in steps[: run[0]])
    for number in run:
        step = steps[number]
        count = len(step.action_ids)
        if count and not len(step.prompt_ids):
            raise ValueError(f"{_name(trajectory)} step {number}: an action needs a prompt of at least one token")
        span = slice(len(step.prompt_ids), len(step.prompt_ids) + count)
        trained[span] = True
        logprobs[span] = step.logprobs
        advantages[span] = values[offset : offset + count]
        step_of[span] = number
        versions[span] = step.versions
        offset += count
    routing = _routing([steps[number] for number in run], len(ids))
    return [Row(ids, trained, logprobs, advantages, step_of, versions, index, group, routing)]


def _routing(steps: Sequence[Step], length: int) -> Routing | None:
    """[length, layers, k] the experts of a row's positions: those of the first step that recorded the position.

    A later turn finds them in the prefix cache, or computes them anew (near-ties may then fall otherwise); the last
    token of a turn has its first choice in the next one.
    """
    recorded: list[Routing] = []
    for step in steps:
        if step.routing is None:
            continue
        if len(step.routing) != len(step.prompt_ids) + len(step.action_ids):
            raise ValueError(
                f"a step of {len(step.prompt_ids)} + {len(step.action_ids)} tokens has {len(step.routing)} routes"
            )
        recorded.append(step.routing)
    if not recorded:
        return None
    routing = np.full((length, *recorded[0].shape[1:]), -1, np.int16)
    for part in recorded:
        place = routing[: len(part)]
        lacking = place[:, 0, 0] < 0
        place[lacking] = part[lacking]
    return routing


def _check(trajectory: Trajectory, demonstration: bool) -> None:
    aborted = trajectory.stop_reason == "aborted" or any(step.sample_stop == "aborted" for step in trajectory.steps)
    if trajectory.status == "failed" or aborted:
        what = trajectory.error or trajectory.stop_reason
        raise UntrainableTrajectory(
            f"{_name(trajectory)} {'was aborted' if aborted else 'failed'} ({what}) and cannot be trained: "
            "drop it or sample it again"
        )
    if demonstration:
        return
    for number, step in enumerate(trajectory.steps):
        missing = _missing(step)
        if missing:
            raise MissingLogprobs(
                f"{_name(trajectory)} step {number}: {missing} of {len(step.logprobs)} sampled tokens have no "
                "log-probability; ask the engine for them (an OpenAI-style server: logprobs=true), "
                "or train the trajectory as a demonstration with the sft loss"
            )


def _missing(step: Step) -> int:
    return int(np.count_nonzero(np.isnan(step.logprobs)))


def _name(trajectory: Trajectory) -> str:
    return f"trajectory of task {trajectory.task.family}/{trajectory.task.id} member {trajectory.member}"
