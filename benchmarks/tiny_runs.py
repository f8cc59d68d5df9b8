"""Small complete runs in the corridor, for benchmarks that need hundreds: a cold-started policy that all runs of one
(doors, seed) share, the real loop for a fixed number of environment steps, an evaluation, one JSON-able result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from benchmarks.corridor import CorridorTasks, turns
from renma.errors import RunError
from renma.evaluation.evaluate import evaluate
from renma.learning.learner import Learner
from renma.models.policy import save_policy
from renma.recipe import Recipe
from renma.recipe_checks import check_recipe
from renma.training.algorithms import resolve
from renma.training.cold_start import demonstration_rows, demonstrations, learn_demonstrations, steps_of
from renma.training.judges import make_judges
from renma.training.loop import Loop
from renma.training.rng import seed_all
from renma.training.setup import Parts, assemble
from renma.types import Group, Trajectory

STEPS_PER_DOOR = 1500  # environment steps of one run, for each door of its corridor
ACTION_TOKENS = 6  # a verb is four; a policy that runs on is cut
EPISODES = 64  # of one training step: 8 tasks, 8 members
EVALUATION_SEED = 77
OnProgress = Callable[[str, float], None]  # what is being done, which share of the run is over


class BudgetSpent(Exception):
    """The run has used its environment steps."""


def recipe_for(
    doors: Sequence[int], seed: int, algorithm: dict[str, Any], rate: float = 1e-3, **sections: Any
) -> Recipe:
    """The recipe of one run. doors: the lengths of its corridors. sections: whole sections, in place of those here.

    The critic's rate is the same for all: ten times the policy's, the default, unlearns what so small a trunk knows.
    """
    longest = turns(max(doors))
    tree: dict[str, Any] = {
        "name": "corridor",
        "seed": seed,
        "model": {
            "type": "scratch",
            "layers": 1,
            "hidden": 48,
            "heads": 4,
            "feed_forward": 96,
            "vocabulary": 259,
            "context": 7 * (longest + 2),
            "output_tokens": "tasks",
            "device": "cpu",
            "dtype": "float32",
        },
        "tasks": {"type": "benchmarks.corridor:CorridorTasks", "doors": list(doors), "seed": seed},
        "environment": {"type": "benchmarks.corridor:Corridor"},
        "agent": {"renderer": {"type": "plain", "user": "{content}\n"}},
        "sampling": {"max_tokens": ACTION_TOKENS},
        "rollout": {
            "tasks_per_step": EPISODES // 8,
            "group_size": 8,
            "max_turns": longest,
            "slots": EPISODES,
        },
        "algorithm": algorithm,
        "learner": {"learning_rate": rate, "mini_batch": EPISODES // 4},
        "critic": {"learning_rate": 3e-3},
        "cold_start": {
            "demonstrator": {"type": "benchmarks.corridor:CorridorDemonstrator"},
            "demonstrations": 900,
            "epochs": 3,
            "batch": 8,
            "learner": {"learning_rate": 5e-3, "schedule": "cosine", "warmup_steps": 10},
        },
        "evaluation": {"temperature": 1.0},
        "training": {"steps": 100_000, "checkpoint_every": 0},
    }
    recipe = Recipe.model_validate(tree | sections)
    check_recipe(recipe)
    return recipe


def starting_policy(doors: Sequence[int], seed: int, folder: Path) -> Path:
    """The folder of the policy that has seen demonstrations of all these lengths, made when it is not there yet."""
    place = folder / "-".join(map(str, [*doors, "seed", seed]))
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(place.with_suffix(".lock")):
        if not place.exists():
            _make_starting_policy(doors, seed, place)
    return place


def _make_starting_policy(doors: Sequence[int], seed: int, place: Path) -> None:
    recipe = recipe_for(doors, seed, {"preset": "grpo"})
    seed_all(seed)
    parts = assemble(recipe)
    asyncio.run(cold_start(recipe, parts))
    save_policy(parts.policy, place)


async def cold_start(recipe: Recipe, parts: Parts) -> None:
    """Learn from demonstrations, as a recipe's run does before it samples."""
    assert recipe.cold_start is not None
    rows = demonstration_rows(await demonstrations(parts))
    learner = learner_of(parts, recipe.cold_start.learner, steps_of(recipe, len(rows)))
    await learn_demonstrations(recipe, learner, rows, lambda step, statistics: None)


def learner_of(parts: Parts, section: Any, steps: int | None = None) -> Learner:
    return Learner(
        parts.policy.model,
        section,
        output_ids=parts.policy.output_ids,
        temperature=1.0,
        compute_dtype=parts.policy.compute_dtype,
        total_steps=steps,
    )


class Curve:
    """Takes what the loop hands out: each training step's success and environment steps, until the budget is spent."""

    def __init__(self, budget: int, progress: OnProgress, keep: Sequence[str] = ()) -> None:
        self.budget, self.progress, self.keep = budget, progress, keep
        self.used = 0
        self.points: list[dict[str, float]] = []

    def episode_done(self, step: int, trajectory: Trajectory) -> None:
        self.used += len(trajectory.steps)

    def learned(self, step: int, groups: Sequence[Group], batch: Any, metrics: dict[str, float]) -> None:
        kept = {key: metrics[key] for key in ("success", *self.keep) if key in metrics}
        self.points.append({"steps": self.used, **kept})
        self.progress(f"success {metrics.get('success', float('nan')):.2f}", min(1.0, self.used / self.budget))

    async def step_done(self, loop: Loop) -> None:
        if self.used >= self.budget:
            raise BudgetSpent

    def area(self) -> float:
        """The mean success over the environment steps up to the budget: the area under the learning curve.

        Where the run ended before, its last success counts for the rest.
        """
        edges = np.minimum([0.0, *(point["steps"] for point in self.points)], self.budget)
        edges[-1] = self.budget
        return float(np.dot(np.diff(edges), [point["success"] for point in self.points]) / self.budget)


def train(recipe: Recipe, parts: Parts, learner: Learner, curve: Curve) -> str:
    """The loop, until the curve's budget is spent; or why it could not go on (dapo, where no group is mixed)."""
    algorithm = resolve(recipe.algorithm)
    with tempfile.TemporaryDirectory() as folder:
        judges = make_judges(recipe, algorithm, parts.policy, learner, Path(folder))
    try:
        asyncio.run(Loop(parts, learner, algorithm, curve, judges=judges).run())  # type: ignore[arg-type]
    except BudgetSpent:
        return ""
    except RunError as error:
        if not curve.points:
            raise
        return str(error)
    return ""


def evaluation(parts: Parts, doors: int, tasks: int) -> dict[str, Any]:
    """Success at temperature 1 on corridors that no run trains on, one attempt each; `wins` says which."""
    source = CorridorTasks(doors=[doors], seed=EVALUATION_SEED)

    async def measure() -> dict[str, Any]:  # numbers only: asyncio.run spells its result out when it ends
        await parts.evaluator.engine.load_weights(0)
        result = await evaluate(parts.evaluator, [source[i] for i in range(tasks)], name="held-out")
        return {"success": result.success, "wins": list(result.successes)}

    return asyncio.run(measure())


def start_of(policy: Path, parts: Parts, doors: int, tasks: int) -> float:
    """The starting policy's success, measured once and kept beside it."""
    kept = policy.with_name(f"{policy.name}-{doors}-doors-{tasks}-tasks.json")
    if not kept.exists():
        kept.write_text(json.dumps(evaluation(parts, doors, tasks)["success"]), encoding="utf-8")
    return float(json.loads(kept.read_text(encoding="utf-8")))


def run(
    doors: int,
    seed: int,
    algorithm: dict[str, Any],
    policy: Path,
    rate: float,
    *,
    budget: int | None = None,
    tasks: int = 200,
    keep: Sequence[str] = (),
    progress: OnProgress = lambda text, share: None,
    change: Callable[[Parts], None] = lambda parts: None,
    **sections: Any,
) -> dict[str, Any]:
    """Train the starting policy once and measure. change: done to the parts before training (another sampler, say)."""
    started = time.perf_counter()
    recipe = recipe_for([doors], seed, algorithm, rate, **sections)
    seed_all(seed)
    parts = assemble(recipe, policy_folder=policy)
    learner = learner_of(parts, recipe.learner)
    before = start_of(policy, parts, doors, tasks)
    change(parts)
    curve = Curve(budget or STEPS_PER_DOOR * doors, progress, keep)
    ended = train(recipe, parts, learner, curve)
    after = evaluation(parts, doors, tasks)
    return {
        "doors": doors,
        "seed": seed,
        "start": before,
        "success": after["success"],
        "wins": after["wins"],
        "area": curve.area(),
        "environment_steps": curve.used,
        "updates": len(curve.points),
        "ended": ended,
        "curve": curve.points,
        "seconds": time.perf_counter() - started,
    }


class Results:
    """Results by name in one JSON file, written whole after each run, so that a benchmark goes on where it stopped.

    Several processes may add to one file, each with runs of its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs = self._written()

    def _written(self) -> dict[str, dict[str, Any]]:
        return dict(json.loads(self.path.read_text(encoding="utf-8"))) if self.path.exists() else {}

    def add(self, name: str, result: dict[str, Any]) -> None:
        with FileLock(self.path.with_suffix(".lock")):
            self.runs = self._written() | {name: result}
            aside = self.path.with_suffix(".part")
            aside.write_text(json.dumps(self.runs), encoding="utf-8")
            os.replace(aside, self.path)


def parsed(parser: argparse.ArgumentParser, out: str) -> argparse.Namespace:
    """The command line, with the options that all these benchmarks have; `out` is where results go by default.

    Tiny tensors gain nothing from more threads, so one is used; two benchmarks can then share two cores.
    """
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--policies", type=Path, help="folder of the starting policies; default: beside --out")
    parser.add_argument("--budget", type=int, help=f"environment steps of a run; default: {STEPS_PER_DOOR} a door")
    parser.add_argument("--table", action="store_true", help="print what is there; run nothing")
    arguments = parser.parse_args()
    arguments.policies = arguments.policies or arguments.out.with_suffix(".policies")
    torch.set_num_threads(1)
    return arguments
