"""Where a training step's time goes, what of it is not model compute, and tokens per second, for the shipped recipes.

    python benchmarks/step_time.py                                  # both recipes, 5 steps each
    python benchmarks/step_time.py quickstart --steps 9
    python benchmarks/step_time.py quickstart --steps 2 --set rollout.tasks_per_step=4      # a quick look

Each recipe runs its own loop with everything a run writes (metrics, trajectories as Parquet) in a temporary folder,
from its cold-started policy (`--cold`: from the policy as it comes, which writes longer actions; `--policies FOLDER`
keeps the cold-started ones for the next time). No evaluation and no checkpoint; the first step warms up and is not
counted. Medians over the rest. Time is the own time of the spans in the code (renma/profiling.py), so the phases add up
to the step; environments, rewards and the writer's thread run beside the loop and are told apart. On a busy machine,
`--cpu` with OMP_NUM_THREADS=1 counts the CPU time of the loop's thread instead of the clock: shares then hold, waiting
is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from renma.errors import RenmaError
from renma.models.policy import save_policy
from renma.profiling import Recording, recording
from renma.recipe_load import load_recipe
from renma.recipes import find_recipe
from renma.rollout.store import TrajectoryStore
from renma.training.algorithms import resolve
from renma.training.cold_start import demonstration_rows, demonstrations, learn_demonstrations, steps_of
from renma.training.loop import Loop
from renma.training.metrics import MetricsLog
from renma.training.profile import MODEL, REST, share_of_rest
from renma.training.progress import Progress
from renma.training.records import Records
from renma.training.run_folder import RunFolder
from renma.training.setup import Parts, assemble
from renma.training.stages import make_learner

REST_SHARE = "rest_share"
FIGURES = {
    "trajectories": "trajectories",
    "sampled_tokens": "sampled tokens",
    "learner/positions": "positions computed by the learner",
    "learner/row_tokens": "positions without sharing",
    "tokens_per_second_rollout": "sampled tokens/s, rollout",
    "tokens_per_second": "sampled tokens/s, end to end",
}


class Written(Records):
    """A run's records, with each step's metrics kept; nothing is evaluated or saved between steps."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.steps: list[dict[str, float]] = []

    def learned(self, step: int, groups: Any, batch: Any, metrics: dict[str, float]) -> None:
        super().learned(step, groups, batch, metrics)
        self.steps.append(dict(metrics))

    async def step_done(self, loop: Loop) -> None:
        return None


def cold_started(name: str, parts: Parts, console: Console) -> None:
    """Teach the policy the recipe's demonstrations."""
    recipe = parts.recipe
    assert recipe.cold_start is not None
    groups = asyncio.run(demonstrations(parts))
    rows = demonstration_rows(groups)
    total = steps_of(recipe, len(rows))
    learner = make_learner(recipe, parts.policy, recipe.cold_start.learner, total, temperature=1.0)

    def told(step: int, stats: dict[str, float]) -> None:
        if step % 20 == 0 or step == total:
            console.print(f"{name}: cold start, step {step} of {total}")

    asyncio.run(learn_demonstrations(recipe, learner, rows, told))


def parts_of(name: str, steps: int, arguments: argparse.Namespace, console: Console) -> Parts:
    recipe = load_recipe(find_recipe(name), [f"training.steps={steps}", *arguments.set])
    if arguments.cold or recipe.cold_start is None:
        return assemble(recipe)
    kept = arguments.policies / f"{recipe.name}-{recipe.seed}" if arguments.policies else None
    if kept is not None and kept.exists():
        return assemble(recipe, policy_folder=kept)
    parts = assemble(recipe)
    cold_started(name, parts, console)
    if kept is not None:
        save_policy(parts.policy, kept)
    return parts


def measure(name: str, arguments: argparse.Namespace, console: Console) -> list[dict[str, float]]:
    """For each step after the first: the loop's metrics, own seconds by phase, and seconds of what ran beside."""
    parts = parts_of(name, arguments.steps + 1, arguments, console)
    recipe = parts.recipe
    learner = make_learner(recipe, parts.policy, recipe.learner, recipe.training.steps)
    recordings: list[Recording] = []

    @contextmanager
    def profiled(version: int) -> Iterator[None]:
        with recording(clock=time.thread_time_ns if arguments.cpu else time.perf_counter_ns) as found:
            yield
        recordings.append(found)
        took = sum(found.own_seconds().values())
        console.print(f"{name}: step {version + 1} of {recipe.training.steps}, {took:.2f} s")

    with (
        tempfile.TemporaryDirectory() as folder,
        RunFolder.create(Path(folder), "run") as run,
        MetricsLog(run.path, recipe.trackers) as log,
        TrajectoryStore(run.trajectories) as store,
        Progress("quiet") as progress,
    ):
        records = Written(parts, run, log, store, progress)
        asyncio.run(Loop(parts, learner, resolve(recipe.algorithm), records, profiled=profiled).run())
    return [step | numbers(found) for step, found in zip(records.steps, recordings, strict=True)][1:]


def numbers(found: Recording) -> dict[str, float]:
    """A step's own seconds by phase, seconds of what ran beside it, and what they come to."""
    own = found.own_seconds()
    return (
        {f"own/{key}": value for key, value in own.items()}
        | {f"beside/{key}": value for key, value in found.beside_seconds().items()}
        | {"step": sum(own.values()), REST_SHARE: share_of_rest(own)}
    )


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Of each number, over the steps; 0 where a step has none."""
    return {key: statistics.median([s.get(key, 0.0) for s in steps]) for key in sorted({k for s in steps for k in s})}


def table(found: dict[str, dict[str, float]], steps: int) -> Table:
    result = Table(title=f"median of {steps} steps; {torch.get_num_threads()} threads")
    result.add_column("")
    for name in found:
        result.add_column(name, justify="right")

    def row(label: str, cells: list[str]) -> None:
        if any(cells):
            result.add_row(label, *cells)

    def seconds(key: str) -> list[str]:
        return [f"{m[key]:.4f} s {m[key] / m['step']:6.1%}" if key in m else "" for m in found.values()]

    row("a step", [f"{m['step']:.4f} s {1:6.1%}" for m in found.values()])
    for key, label in MODEL.items():
        row(f"  {label}", seconds(f"own/{key}"))
    row("not model compute", [f"{m[REST_SHARE]:.1%}" for m in found.values()])
    for key, label in REST.items():
        row(f"  {label}", seconds(f"own/{key}"))
    result.add_section()
    beside = sorted({key for m in found.values() for key in m if key.startswith("beside/")})
    for key in beside:
        row(f"{key.removeprefix('beside/')}, beside the loop, summed", seconds(key))
    result.add_section()
    for key, label in FIGURES.items():
        row(label, [f"{m[key]:,.0f}" if key in m else "" for m in found.values()])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["quickstart", "word-problems"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a leaf of the recipe")
    parser.add_argument("--cold", action="store_true", help="no cold start: the policy as it comes")
    parser.add_argument("--cpu", action="store_true", help="CPU time of threads, for a busy machine")
    parser.add_argument("--policies", type=Path, help="keep cold-started policies here, and take them from here")
    parser.add_argument("--save", type=Path, help="add the medians to this JSON file, as each recipe is done")
    arguments = parser.parse_args()
    console = Console()
    found: dict[str, dict[str, float]] = {}
    try:
        for name in arguments.recipes:
            found[name] = medians(measure(name, arguments, console))
            if arguments.save:
                saved = json.loads(arguments.save.read_text(encoding="utf-8")) if arguments.save.exists() else {}
                arguments.save.write_text(json.dumps(saved | found, indent=1), encoding="utf-8")
    except RenmaError as error:
        parser.exit(error.exit_code, f"step_time: {error}\n")
    console.print(table(found, arguments.steps))
    console.print("Weights reach the local engine without a copy: it samples from the learner's own tensors.")
    if arguments.save:
        console.print(f"wrote {arguments.save}")


if __name__ == "__main__":
    main()
