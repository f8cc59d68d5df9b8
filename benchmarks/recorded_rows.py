"""Token rows of a real rollout, kept in one .npz file, so that a benchmark learns from the same batch every time.

`record` runs a recipe's own rollout once: its tasks, environment, header and policy. Each trajectory gets an advantage
drawn at random, none of them 0: a benchmark of the learner wants every row to take part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.tiny_runs import cold_start
from renma.errors import DataError
from renma.learning.rows import Row, rows_of
from renma.recipe import Recipe
from renma.training.setup import assemble
from renma.types import Group

ARRAYS = ("ids", "trained", "logprobs", "advantages", "step", "versions")
DEMONSTRATIONS = 800  # of a scratch policy's cold start: enough that it takes turns and answers


def record(recipe: Recipe, tasks: int, members: int, *, seed: int = 0) -> list[Row]:
    """The rows of `tasks` x `members` trajectories that the recipe's policy samples.

    A pretrained policy is taken as it is. One from scratch would write noise: it gets a short cold start before.
    """
    if recipe.model.type == "scratch" and recipe.cold_start is not None:
        shorter = {"demonstrations": min(DEMONSTRATIONS, recipe.cold_start.demonstrations), "epochs": 2}
        recipe = recipe.model_copy(update={"cold_start": recipe.cold_start.model_copy(update=shorter)})
    parts = assemble(recipe)

    async def sample() -> list[Group]:
        if recipe.model.type == "scratch" and recipe.cold_start is not None:
            await cold_start(recipe, parts)
        await parts.engine.load_weights(0)
        return await parts.runner.groups([parts.task_at(i) for i in range(tasks)], members)

    groups = asyncio.run(sample())
    trajectories = [(number, t) for number, group in enumerate(groups) for t in group.trainable]
    rows = [row for i, (number, t) in enumerate(trajectories) for row in rows_of(t, i, group=number)]
    return credited(rows, seed)


def credited(rows: Sequence[Row], seed: int = 0) -> list[Row]:
    """The rows, each trajectory with an advantage of its own: +-(0.5 to 1.5)."""
    rng = np.random.default_rng(seed)
    count = 1 + max((row.trajectory for row in rows), default=-1)
    value = rng.uniform(0.5, 1.5, count) * rng.choice([-1.0, 1.0], count)
    return [replace(row, advantages=np.where(row.trained, value[row.trajectory], 0).astype(np.float32)) for row in rows]


def save_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows' arrays, joined, with each row's length, trajectory and group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    joined = {name: np.concatenate([getattr(row, name) for row in rows]) for name in ARRAYS}
    each = {name: np.array([getattr(row, name) for row in rows], np.int64) for name in ("trajectory", "group")}
    lengths = np.array([len(row) for row in rows], np.int64)
    np.savez_compressed(path, lengths=lengths, **joined, **each)  # type: ignore[arg-type]


def load_rows(path: Path) -> list[Row]:
    """The rows that `save_rows` wrote. Raises DataError where the file is missing or holds something else."""
    if not path.is_file():
        raise DataError(f"there are no rows at {path}: run the benchmark without --rows to record some")
    with np.load(path, allow_pickle=False) as file:
        lacking = [name for name in ("lengths", "trajectory", "group", *ARRAYS) if name not in file]
        if lacking:
            raise DataError(f"{path} lacks {', '.join(lacking)}: it was not written by this benchmark")
        edges = np.cumsum(file["lengths"])[:-1]
        columns = [np.split(file[name], edges) for name in ARRAYS]
        owners = zip(file["trajectory"].tolist(), file["group"].tolist(), strict=True)
    return [Row(*arrays, *owner) for *arrays, owner in zip(*columns, owners, strict=True)]
