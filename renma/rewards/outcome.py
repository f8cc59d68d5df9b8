"""The rewards that come with Renma, each a small class called with the trajectory."""

from __future__ import annotations

from typing import ClassVar

from renma.errors import RecipeError
from renma.rewards.numbers import number_of, same_number
from renma.types import Trajectory


class Success:
    """1 when the environment said that the task is solved, else 0.

    An episode that was cut off before the environment could say counts as not solved: done is not won. None when a
    finished environment says nothing of success.
    """

    blocking: ClassVar[bool] = False

    def __call__(self, trajectory: Trajectory) -> float | None:
        if trajectory.success is None and trajectory.status == "done":
            return None
        return 1.0 if trajectory.success else 0.0


class AnswerNumber:
    """1 when the last action is an answer that states the task's number, else 0; None when the task has no number.

    What counts as stating a number is told in rewards/numbers.py.
    """

    blocking: ClassVar[bool] = False

    def __call__(self, trajectory: Trajectory) -> float | None:
        if number_of(trajectory.task.answer) is None:
            return None
        if not trajectory.steps or trajectory.steps[-1].action.tool_calls:
            return 0.0
        return 1.0 if same_number(trajectory.steps[-1].action.text, trajectory.task.answer) else 0.0


class Format:
    """The share of actions that are well formed: calls that could all be parsed, or a text. None without actions."""

    blocking: ClassVar[bool] = False

    def __call__(self, trajectory: Trajectory) -> float | None:
        if not trajectory.steps:
            return None
        actions = [step.action for step in trajectory.steps]
        formed = [
            all(call.error is None for call in action.tool_calls) if action.tool_calls else bool(action.text.strip())
            for action in actions
        ]
        return sum(formed) / len(formed)


class Turns:
    """A penalty for each action past the first `free` ones: -cost × their number."""

    blocking: ClassVar[bool] = False

    def __init__(self, *, cost: float = 0.01, free: int = 1) -> None:
        if cost < 0 or free < 0:
            raise RecipeError(f"reward 'turns': cost and free are at least 0, got {cost} and {free}")
        self._cost = cost
        self._free = free

    def __call__(self, trajectory: Trajectory) -> float:
        return -self._cost * max(0, len(trajectory.steps) - self._free)


class Overlong:
    """A penalty for trajectories near a length limit: 0 up to limit - buffer sampled tokens, then falling to -factor.

    min(0, -factor × (tokens - (limit - buffer)) / buffer), and never below -factor (Yu et al. 2025, DAPO, eq. 13).
    limit, buffer: in sampled tokens of the whole trajectory.
    """

    blocking: ClassVar[bool] = False

    def __init__(self, *, limit: int, buffer: int, factor: float = 1.0) -> None:
        if not 1 <= buffer <= limit or factor < 0:
            raise RecipeError(
                f"reward 'overlong': buffer lies between 1 and limit, and factor is at least 0; got limit {limit}, "
                f"buffer {buffer}, factor {factor}"
            )
        self._free = limit - buffer
        self._buffer = buffer
        self._factor = factor

    def __call__(self, trajectory: Trajectory) -> float:
        over = (trajectory.sampled_tokens - self._free) / self._buffer
        return -self._factor * min(1.0, max(0.0, over))
