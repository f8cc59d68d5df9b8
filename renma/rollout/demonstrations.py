"""Demonstrations: the same agent in the same environment, its actions written by a demonstrator instead of sampled.

Their tokens are encoded once, from the demonstrator's text; their log-probabilities are NaN, since no policy sampled
them, so that nothing can mistake them for a policy's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from renma.agents.base import Agent, Turn
from renma.environments.demonstrators import Demonstrator
from renma.inference.base import Sample, SamplingParams
from renma.rollout.runner import MakeAgent
from renma.types import Ids, Observation, Task


@dataclass(slots=True)
class ScriptedEngine:
    """An engine whose next action is set from outside: `text` is encoded and given back."""

    encode: Callable[[str], list[int]]
    context: int
    version: int = 0
    has_logprobs: bool = False
    text: str = ""

    async def sample(self, prompt_ids: Sequence[int] | Ids, params: SamplingParams, *, key: tuple = ()) -> Sample:
        ids = np.asarray(self.encode(self.text), dtype=np.int32)
        return Sample(ids, np.full(len(ids), np.nan, np.float32), np.zeros(len(ids), np.int32), "stop")

    async def load_weights(self, version: int) -> None:
        self.version = version

    def episode_opened(self) -> None: ...

    def episode_closed(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class DemonstratingAgent:
    """Acts as the demonstrator says, through the agent that the policy will have."""

    inner: Agent
    engine: ScriptedEngine
    demonstrator: Demonstrator
    task: Task
    rng: random.Random
    turn: int = field(default=0)

    async def act(self, observation: Observation) -> Turn:
        self.engine.text = self.demonstrator.write(self.task, self.turn, observation, self.rng)
        self.turn += 1
        return await self.inner.act(observation)


def demonstrating(make_agent: MakeAgent, demonstrator: Demonstrator, encode: Callable[[str], list[int]]) -> MakeAgent:
    """A MakeAgent whose agents write what the demonstrator says."""

    def make(
        engine: Any, task: Task, member: int, tools: list[dict[str, Any]], seeds: Callable[[int], int], key: tuple
    ) -> Agent:
        scripted = ScriptedEngine(encode, context=engine.context)
        inner = make_agent(scripted, task, member, tools, seeds, key)
        return DemonstratingAgent(inner, scripted, demonstrator, task, random.Random(seeds(-1)))

    return make
