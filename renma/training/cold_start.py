"""The supervised cold start: demonstrations through the agent's own format, then their log-likelihood raised."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from renma.errors import RunError
from renma.learning.learner import Learner
from renma.learning.losses import sft
from renma.learning.rows import Row, rows_of
from renma.recipe import Recipe
from renma.seeding import seed_for
from renma.training.loop import first_error
from renma.training.setup import Parts
from renma.types import Group


async def demonstrations(parts: Parts) -> list[Group]:
    """One demonstration of each of the first `cold_start.demonstrations` tasks of the run's order."""
    section = parts.recipe.cold_start
    assert section is not None
    tasks = [parts.task_at(i) for i in range(section.demonstrations)]
    groups = await parts.demonstrator().groups(tasks, 1, purpose="demonstrations")
    if not any(group.trainable for group in groups):
        raise RunError(f"the cold start has no demonstration to learn from; first error: {first_error(groups)}")
    return groups


def demonstration_rows(groups: Sequence[Group]) -> list[list[Row]]:
    """The rows of each usable demonstration."""
    usable = [t for group in groups for t in group.trainable]
    return [rows_of(t, index, None, demonstration=True) for index, t in enumerate(usable)]


def steps_of(recipe: Recipe, count: int) -> int:
    """Optimiser steps of the cold start over `count` demonstrations."""
    section = recipe.cold_start
    assert section is not None
    return section.epochs * -(-count // section.batch)


async def learn_demonstrations(
    recipe: Recipe, learner: Learner, rows: Sequence[Sequence[Row]], done: Callable[[int, dict[str, float]], None]
) -> None:
    """Supervised epochs over shuffled batches; `done(step, statistics)` after each optimiser step."""
    section = recipe.cold_start
    assert section is not None
    step = 0
    for epoch in range(section.epochs):
        order = list(range(len(rows)))
        random.Random(seed_for(recipe.seed, "cold_start", epoch)).shuffle(order)
        for start in range(0, len(order), section.batch):
            batch = [row for index in order[start : start + section.batch] for row in rows[index]]
            stats = learner.update(batch, loss=sft(), aggregate="token_mean", seed=step)
            step += 1
            done(step, stats)
            await asyncio.sleep(0)  # an interrupt is seen between steps
