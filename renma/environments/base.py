"""The environment's contract: Gymnasium's meaning, asynchronous.

A complete environment is three lines:

    class Parrot(Environment):
        def reset(self, task): return task.prompt
        def step(self, action): return StepResult(reward=float(action.text == "hello"), terminated=True)

`reset` and `step` may be plain or `async`. An environment is used once, by one episode.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, ClassVar

from renma.types import Action, Observation, StepResult, Task


class Environment:
    """Subclass and give `reset` and `step`; the rest is optional.

    thread_safe: False when two instances in one process disturb each other (module-level state); a recipe that would
    run more than one at a time is then refused.
    blocking: False in a class whose own plain methods and constructor never wait and take no time to speak of: they are
    then called in the event loop, which is quicker than a thread. A subclass has to say so again for itself.
    max_turns: the most actions an episode may take when the recipe does not say.
    """

    thread_safe: ClassVar[bool] = True
    blocking: ClassVar[bool] = True
    max_turns: int = 16

    def reset(self, task: Task) -> Observation | str | Awaitable[Observation | str]:
        raise TypeError(f"{type(self).__name__} has no reset(task): give one that returns the first observation")

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        raise TypeError(f"{type(self).__name__} has no step(action): give one that returns a StepResult")

    def close(self) -> Awaitable[None] | None:
        """Give back what the episode held. Called exactly once, also after an error."""
        return None

    @property
    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas (OpenAI function form) of the tools the agent may call; from methods marked `@tool`."""
        from renma.tools.base import schemas_of

        return schemas_of(self)

    def state_key(self) -> str | None:
        """A key that is equal for equal states (anchor states of GiGPO); None when there is no such thing."""
        return None


def as_observation(value: Observation | str) -> Observation:
    """What `reset` or a StepResult gave, as an Observation: a string is one user message."""
    return value if isinstance(value, Observation) else Observation.of(value)
