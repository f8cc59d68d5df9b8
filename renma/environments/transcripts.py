"""Whole episodes as plain text, written by a demonstrator in a real environment: what tokenizers are trained on.

    Question: 7 + 25 - 4 =
    Call: calc(7+25)
    Result: 32
    Call: calc(32-4)
    Result: 28
    Answer: 28

The text is that of the plain format: what the plain renderer shows and the plain parser reads.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable
from typing import Any

from renma.agents.parsers.plain import PlainParser
from renma.environments.base import Environment, as_observation
from renma.environments.demonstrators import Demonstrator
from renma.event_loop import run_to_end
from renma.seeding import seed_for
from renma.types import Observation, Task

_LABELS = {"tool": "Result: ", "user": "Question: ", "system": "", "assistant": ""}


async def transcript_async(task: Task, environment: Environment, demonstrator: Demonstrator, rng: random.Random) -> str:
    """One episode as text. The environment is used up: it is closed at the end, also after an error."""
    parser = PlainParser()
    try:
        observation = as_observation(await _value(environment.reset(task)))
        pieces = [_shown(observation)]
        for turn in range(environment.max_turns):
            written = demonstrator.write(task, turn, observation, rng)
            pieces.append(written)
            result = await _value(environment.step(parser.parse((), written)))
            observation = as_observation(result.observation)
            pieces.append(_shown(observation))
            if result.terminated or result.truncated:
                break
        return "".join(pieces)
    finally:
        await _value(environment.close())


def transcript(task: Task, environment: Environment, demonstrator: Demonstrator, rng: random.Random) -> str:
    """One episode as text; for use where nothing is awaited."""
    return run_to_end(transcript_async(task, environment, demonstrator, rng))


def transcripts(
    tasks: Iterable[Task], make_environment: Callable[[], Environment], demonstrator: Demonstrator, seed: int = 0
) -> list[str]:
    """An episode of each task, with a fresh environment and its own random numbers each."""

    async def write_all() -> list[str]:
        texts = []
        for task in tasks:
            rng = random.Random(seed_for("transcript", seed, task.family, task.id))
            texts.append(await transcript_async(task, make_environment(), demonstrator, rng))
        return texts

    return run_to_end(write_all())


def _shown(observation: Observation) -> str:
    return "".join(f"{_LABELS[message.role]}{message.text}\n" for message in observation.messages)


async def _value(given: Any) -> Any:
    return await given if inspect.isawaitable(given) else given
