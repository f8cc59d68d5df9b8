"""Where a training step's time goes, and tokens per second, for the shipped recipes.

    python benchmarks/step_time.py                       # both recipes, 5 steps each
    python benchmarks/step_time.py quickstart --steps 9

Each recipe runs its own loop from its starting policy (no cold start, no evaluation); the first step warms up and is
not counted. Medians over the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from renma.learning.learner import Learner
from renma.recipe_load import load_recipe
from renma.recipes import find_recipe
from renma.training.algorithms import resolve
from renma.training.loop import Loop
from renma.training.setup import assemble


class Timings:
    """Takes what the loop hands out and keeps the metrics; nothing is written."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.environment = self.reward = 0.0

    def episode_done(self, step: int, trajectory: Any) -> None:
        self.environment += sum(s.seconds.get("environment", 0.0) for s in trajectory.steps)
        self.reward += trajectory.reward_seconds

    def learned(self, step: int, groups: Any, batch: Any, metrics: dict[str, float]) -> None:
        self.steps.append({**metrics, "seconds_environment": self.environment, "seconds_reward": self.reward})
        self.environment = self.reward = 0.0

    async def step_done(self, loop: Loop) -> None:
        return None


def measure(name: str, steps: int, overrides: list[str]) -> list[dict[str, float]]:
    recipe = load_recipe(find_recipe(name), [f"training.steps={steps + 1}", *overrides])
    parts = assemble(recipe)
    learner = Learner(
        parts.policy.model,
        recipe.learner,
        output_ids=parts.policy.output_ids,
        temperature=recipe.sampling.temperature,
        compute_dtype=parts.policy.compute_dtype,
        total_steps=steps + 1,
    )
    timings = Timings()
    asyncio.run(Loop(parts, learner, resolve(recipe.algorithm), timings).run())  # type: ignore[arg-type]
    return timings.steps[1:]


ROWS = [
    ("rollout (sampling and environment)", "seconds_rollout"),
    ("  of it in environments, summed over episodes", "seconds_environment"),
    ("  of it in rewards, summed over episodes", "seconds_reward"),
    ("credit, rows", "seconds_credit"),
    ("learner", "seconds_learn"),
    ("sync (weights to the engine)", "seconds_sync"),
    ("trajectories", "trajectories"),
    ("sampled tokens", "sampled_tokens"),
    ("positions computed by the learner", "learner/positions"),
    ("positions without sharing", "learner/row_tokens"),
    ("sampled tokens/s, rollout", "tokens_per_second_rollout"),
    ("sampled tokens/s, end to end", "tokens_per_second"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["quickstart", "word-problems"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a leaf of the recipe")
    parser.add_argument("--save", type=Path, help="write the medians to this JSON file")
    arguments = parser.parse_args()
    console = Console()
    table = Table(title=f"median of {arguments.steps} steps; {torch.get_num_threads()} threads")
    table.add_column("")
    medians: dict[str, dict[str, float]] = {}
    for name in arguments.recipes:
        steps = measure(name, arguments.steps, arguments.set)
        medians[name] = {
            key: statistics.median([s[key] for s in steps if key in s])
            for _, key in ROWS
            if any(key in s for s in steps)
        }
        table.add_column(name, justify="right")
    for label, key in ROWS:
        table.add_row(label, *[f"{medians[name].get(key, float('nan')):,.2f}" for name in arguments.recipes])
    console.print(table)
    console.print("Weights reach the local engine without a copy: it samples from the learner's own tensors.")
    if arguments.save:
        arguments.save.write_text(json.dumps(medians, indent=1), encoding="utf-8")
        console.print(f"wrote {arguments.save}")


if __name__ == "__main__":
    main()
