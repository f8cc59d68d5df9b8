"""Conversations that somebody wrote, as trajectories: through the agent's own format, to the exact ids it would see.

Like a demonstration's, the actions' log-probabilities are NaN: no policy sampled them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from renma.agents.base import ContextFull
from renma.errors import DataError
from renma.rollout.demonstrations import ScriptedEngine
from renma.rollout.runner import Runner
from renma.types import Message, Observation, Step, Task, Trajectory


class TooLong(DataError):
    """A conversation that does not fit the model's context."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes what is said in a conversation as an agent's actions.

    make_agent, context: of the policy's runner. tools: the schemas its first prompt shows. encode: an action's text to
    its ids, with the stop that ends it.
    """

    make_agent: Callable[..., Any]
    context: int
    tools: list[dict[str, Any]]
    encode: Callable[[str], list[int]]

    async def trajectory(
        self, task: Task, member: int, prompt: Sequence[Message], said: Sequence[Message]
    ) -> Trajectory:
        """`said` begins with an assistant's message; each of those is an action, and what stands between them is what
        the environment answered. Raises TooLong when prompt and action do not fit the context."""
        engine = ScriptedEngine(self.encode, context=self.context)
        agent = self.make_agent(engine, task, member, self.tools, lambda turn: 0, ())
        steps: list[Step] = []
        shown = Observation(tuple(prompt))
        places = [place for place, message in enumerate(said) if message.role == "assistant"]
        for place, following in zip(places, [*places[1:], len(said)], strict=True):
            engine.text = said[place].text
            try:
                turn = await agent.act(shown)
            except ContextFull as full:
                raise TooLong(f"turn {len(steps)}: {full}") from full
            size = len(turn.prompt_ids) + len(turn.sample.ids)
            if size > self.context:
                raise TooLong(f"turn {len(steps)} ends at {size} tokens; the context is {self.context}")
            shown = Observation(tuple(said[place + 1 : following]))
            steps.append(
                Step(
                    turn.prompt_ids,
                    turn.sample.ids,
                    turn.sample.logprobs,
                    turn.sample.versions,
                    turn.action,
                    shown,
                    terminated=following == len(said),
                )
            )
        return Trajectory(task, member, tuple(steps), "done", "answer")


async def writer_for(runner: Runner, renderer: Any) -> Writer:
    """A writer in the format of the runner's agents, with the tools of its environment."""
    environment = runner.make_environment()
    tools = list(environment.tools)
    closing = environment.close()
    if inspect.isawaitable(closing):
        await closing
    return Writer(runner.make_agent, runner.engine.context, tools, action_encoder(renderer))


def action_encoder(renderer: Any) -> Callable[[str], list[int]]:
    """An action's text to its ids, ended as the policy itself would end it: by the format's stop token or stop string.

    The encoder raises DataError for a text that goes on after a stop string: no policy could write on there.
    """
    closing = _closing(renderer)
    ending = "" if closing else next(iter(renderer.stop_strings), "")
    last = closing or list(renderer.stop_ids[:1] if not ending else ())

    def encode(text: str) -> list[int]:
        stops = [stop for stop in renderer.stop_strings if stop in text]
        cut = next((stop for stop in stops if stop in text.removesuffix(stop)), None)
        if cut is not None:
            raise DataError(
                f"the text {text[:60]!r} goes on after {cut!r}, which ends an action in this format; use a renderer "
                "with another stop (agent.renderer.stop), or a chat renderer"
            )
        ids = list(renderer.encode_action(text if stops else text + ending))
        ended = bool(stops) or (bool(ids) and ids[-1] in renderer.stop_ids)
        return ids if ended else ids + last

    return encode


def _closing(renderer: Any) -> list[int]:
    """What the format writes between an assistant's words and the next message, up to its stop token; [] if none."""
    words = list(renderer.encode_action("x"))
    following = renderer.extend([Message("assistant", "x")], [], words, [Message("user", "x")])[len(words) :]
    ends = np.flatnonzero(np.isin(following, renderer.stop_ids))
    return list(following[: ends[0] + 1]) if len(ends) else []
