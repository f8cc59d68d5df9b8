"""Renma's side of end_to_end.py, each call a process of its own: a starting policy, timed training, an evaluation.

python -m benchmarks.end_to_end_renma prepare|train|evaluate WORK.json RESULT.json
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.tiny_runs import cold_start
from renma.evaluation.evaluate import evaluate
from renma.models.policy import save_policy
from renma.recipe import Recipe
from renma.recipe_load import load_recipe
from renma.recipes import find_recipe
from renma.training.algorithms import resolve
from renma.training.loop import Loop
from renma.training.rng import seed_all
from renma.training.setup import Parts, assemble
from renma.training.stages import make_learner
from renma.types import Group, Trajectory


class Clock:
    """Takes what the loop hands out; measures from one step's end to the next one's, and saves outside of that."""

    def __init__(self, parts: Parts, total: int, saves: dict[str, str]) -> None:
        self.parts, self.total, self.saves = parts, total, saves
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        self.mark = time.perf_counter()

    def episode_done(self, step: int, trajectory: Trajectory) -> None:
        return None

    def learned(self, step: int, groups: Sequence[Group], batch: Any, metrics: dict[str, float]) -> None:
        members = [t for group in groups for t in group.trajectories]
        self._now = {
            "generation": metrics["seconds_rollout"],
            "trajectories": len(members),
            "sampled_tokens": sum(t.sampled_tokens for t in members),
            "turns": sum(len(t.steps) for t in members) / len(members),
            "success": sum(t.solved for t in members) / len(members),
            "mixed": sum(len({t.solved for t in group.trajectories}) > 1 for group in groups) / len(groups),
        }

    async def step_done(self, loop: Loop) -> None:
        last = {"seconds": time.perf_counter() - self.mark, **self._now}
        self.steps.append(last)
        print(
            f"renma step {loop.version}/{self.total}: {last['seconds']:.1f} s, {last['generation']:.1f} of them "
            f"sampling {last['sampled_tokens']:.0f} tokens; success {last['success']:.2f}",
            file=sys.stderr,
            flush=True,
        )
        folder = self.saves.get(str(loop.version))
        if folder is not None:
            save_policy(self.parts.policy, Path(folder))
        self.mark = time.perf_counter()


def recipe_of(work: dict[str, Any]) -> Recipe:
    return load_recipe(find_recipe(work["recipe"]), work["overrides"])


def prepare(work: dict[str, Any]) -> dict[str, Any]:
    """Save the policy that both sides start from: the recipe's own, or that after its cold start."""
    recipe = recipe_of(work)
    seed_all(recipe.seed)
    parts = assemble(recipe)
    if work["start"] == "cold":
        asyncio.run(cold_start(recipe, parts))
    save_policy(parts.policy, Path(work["policy"]))
    return {"policy": parts.policy.description}


def train(work: dict[str, Any]) -> dict[str, Any]:
    """Train from the policy's folder with the recipe's own loop; nothing is logged or stored."""
    recipe = recipe_of(work)
    seed_all(recipe.seed)
    parts = assemble(recipe, policy_folder=Path(work["policy"]))
    total = recipe.training.steps
    learner = make_learner(recipe, parts.policy, recipe.learner, total)
    clock = Clock(parts, total, work["saves"])
    asyncio.run(Loop(parts, learner, resolve(recipe.algorithm), clock).run())  # type: ignore[arg-type]
    return {
        "steps": clock.steps,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {name: version(name) for name in ("transformers", "torch")},
    }


def evaluation(work: dict[str, Any]) -> dict[str, Any]:
    """Greedy success of each saved policy on the first tasks of the recipe's first evaluation set."""
    recipe, found = recipe_of(work), {}
    for step, folder in work["policies"].items():
        parts = assemble(recipe, policy_folder=Path(folder))
        chosen = parts.evaluation[0]

        async def measure(parts: Parts = parts, chosen: Any = chosen) -> float:
            await parts.evaluator.engine.load_weights(0)
            result = await evaluate(parts.evaluator, chosen.tasks[: work["tasks"]], name=chosen.name)
            return result.success

        found[step] = asyncio.run(measure())
        print(f"accuracy at step {step}: {found[step]:.3f}", file=sys.stderr, flush=True)
    return {"accuracy": found}


def main(what: str, work_file: str, result_file: str) -> None:
    work = json.loads(Path(work_file).read_text(encoding="utf-8"))
    torch.set_num_threads(work["threads"])
    result = {"prepare": prepare, "train": train, "evaluate": evaluation}[what](work)
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
