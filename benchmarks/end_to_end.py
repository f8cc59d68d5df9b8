"""Renma's loop and TRL's GRPOTrainer on the same work, interleaved: trajectories per second into gradients.

    python benchmarks/end_to_end.py --recipe word-problems --runs 5          # hours: TRL takes minutes a step
    python benchmarks/end_to_end.py --recipe quickstart --runs 5
    python benchmarks/end_to_end.py --recipe quickstart --quick              # one small step of each, to see it work
    python benchmarks/end_to_end.py --recipe word-problems --time-to-accuracy --updates 8 --every 2

A run is one process of each side, with one warm-up step and then `--steps` timed ones, from the same weights, on the
same tasks in the same order, with the same rates. Runs are kept in `--out`; a benchmark that was stopped goes on where
it was. `make bench-setup` makes TRL's environment. What is compared, and how, is told in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import end_to_end_report as report
from benchmarks.tiny_runs import Results
from renma.errors import RecipeError, RunError
from renma.learning.optimizer import learning_rate
from renma.models.devices import pick_device, pick_dtype
from renma.models.folders import SIDECAR, read_json
from renma.recipe import Recipe
from renma.recipe_load import load_recipe
from renma.recipes import find_recipe
from renma.tasks.order import TaskOrder
from renma.training.setup import build_tasks, environment_maker

ROOT = Path(__file__).parent.parent
SIDES = {
    "renma": "the recipe as it is",
    "renma-all": "the recipe with model.output_tokens: all, where it restricts them",
    "trl": "TRL as it is",
    "trl-completions": "TRL with its output layer scoring completions only, as it does on a GPU (a patch of one line)",
}
LOSSES = {"grpo": ("grpo", "group"), "dr_grpo": ("dr_grpo", "none")}  # Renma's preset: TRL's loss_type, scale_rewards
CLIP = (0.8, 1.2)  # of both presets
DEFAULTS: dict[str, dict[str, Any]] = {
    "word-problems": {"start": "base", "steps": 2, "micro_batch": 8, "set": ["rollout.tasks_per_step=8"]},
    "quickstart": {"start": "cold", "steps": 5, "micro_batch": 64, "set": []},
}
QUICK = ["rollout.tasks_per_step=2", "rollout.group_size=4"]


class Comparison:
    """The runs of one comparison: what each side is given, its process, and what is kept of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work: Path = options.work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        self.results = Results(options.out)

    def recipe(self, run: int = 0, steps: int = 1) -> tuple[Recipe, list[str]]:
        """The recipe of a run and the overrides that make it. Every run has its own seed, hence its own tasks."""
        seed = load_recipe(find_recipe(self.options.recipe)).seed
        overrides = ["model.device=cpu", f"training.steps={steps}", *self.options.set, f"seed={seed + run}"]
        return load_recipe(find_recipe(self.options.recipe), overrides), overrides

    def name(self, run: int, side: str) -> str:
        """Equal for runs that may be compared with each other, but for run and side."""
        options = self.options
        kind = f"accuracy-{options.updates}-{options.every}-{options.tasks}" if options.time_to_accuracy else "speed"
        given = json.dumps([options.start, options.set, options.steps, options.threads])
        group = hashlib.sha256(given.encode()).hexdigest()[:8]
        return f"{options.recipe}/{kind}/{group}/{side}/{run}"

    def records(self) -> list[dict[str, Any]]:
        """The runs of this comparison that are done, sides in the order asked for."""
        names = [self.name(run, side) for side in self.options.sides for run in range(self.options.runs)]
        return [self.results.runs[name] for name in names if name in self.results.runs]

    def start(self) -> Path:
        """The folder of the policy that both sides start from, made when it is not there."""
        start = self.options.start
        if start not in ("base", "cold"):
            if not Path(start).is_dir():
                raise RunError(f"--start {start}: there is no such folder; give base, cold or a saved policy's folder")
            return Path(start).resolve()
        folder = self.work / f"{self.options.recipe}-{start}"
        if not folder.exists():
            _, overrides = self.recipe()
            print(f"making the starting policy {folder} ({start})", file=sys.stderr)
            work = {"recipe": self.options.recipe, "overrides": overrides, "start": start, "policy": str(folder)}
            self._renma("prepare", work)
        return folder

    def run(self, run: int, side: str) -> None:
        options = self.options
        timed = options.updates if options.time_to_accuracy else options.steps
        steps = timed if options.time_to_accuracy else timed + 1
        recipe, overrides = self.recipe(run, steps)
        policy = emitting_all(self.start(), self.work) if side == "renma-all" else self.start()
        place = self.work / f"{options.recipe}-{side}-{run}"
        shutil.rmtree(place, ignore_errors=True)
        every = range(options.every, steps + 1, options.every) if options.time_to_accuracy else ()
        saves = {str(step): str(place / f"step-{step}") for step in every}
        if side.startswith("renma"):
            work: dict[str, Any] = {"recipe": options.recipe, "overrides": overrides, "policy": str(policy)}
            result = self._renma("train", work | {"saves": saves})
        else:
            place.mkdir(parents=True)
            work = trl_work(recipe, policy, steps)
            work |= {"micro_batch": options.micro_batch, "threads": options.threads, "saves": saves}
            work["head"] = "completions" if side == "trl-completions" else "stock"
            result = self._process([trl_python(options.venvs), "-m", "benchmarks.peers.trl_grpo"], work)
        record = {"side": side, "run": run, "warm_up": steps - timed, "recipe": options.recipe, "start": options.start}
        record |= {"set": options.set, "threads": options.threads, **result}
        if saves:
            for folder in saves.values():  # TRL does not know of the set of output tokens; judged by the same
                if (policy / SIDECAR).exists() and not (Path(folder) / SIDECAR).exists():
                    shutil.copy(policy / SIDECAR, folder)
            work = {"recipe": options.recipe, "overrides": overrides, "tasks": options.tasks}
            record |= self._renma("evaluate", work | {"policies": {"0": str(policy), **saves}})
        self.results.add(self.name(run, side), record)
        shutil.rmtree(place, ignore_errors=True)

    def _renma(self, what: str, work: dict[str, Any]) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.end_to_end_renma", what]
        return self._process(command, work | {"threads": self.options.threads})

    def _process(self, command: list[str], work: dict[str, Any]) -> dict[str, Any]:
        """Run the command with WORK and RESULT files; its result. Raises RunError when it fails."""
        given, made = self.work / f"work-{os.getpid()}.json", self.work / f"result-{os.getpid()}.json"
        given.write_text(json.dumps(work), encoding="utf-8")
        environment = os.environ | {"OMP_NUM_THREADS": str(self.options.threads), "TOKENIZERS_PARALLELISM": "false"}
        try:
            code = subprocess.run([*command, str(given), str(made)], cwd=ROOT, env=environment).returncode
            if code:
                raise RunError(f"{' '.join(command)} ended with {code}; its message is above")
            return dict(json.loads(made.read_text(encoding="utf-8")))
        finally:
            given.unlink()
            made.unlink(missing_ok=True)
            shutil.rmtree(made.with_suffix(".trl"), ignore_errors=True)


def trl_work(recipe: Recipe, policy: Path, steps: int) -> dict[str, Any]:
    """What TRL is given (peers/trl_grpo.py) so that it does the recipe's work. Raises RecipeError where it cannot."""
    agent, preset = recipe.agent, recipe.algorithm.preset
    parts = {"agent.renderer": agent.renderer, "agent.parser": agent.parser}
    other = [f"{key}.type {part.type!r}" for key, part in parts.items() if part.type != "plain"]
    if recipe.environment.type != "calculator":
        other.append(f"environment.type {recipe.environment.type!r}")
    if preset not in LOSSES or recipe.algorithm.model_fields_set - {"preset"}:
        other.append(f"algorithm {preset!r}, or parts of it replaced")
    if other:
        raise RecipeError(
            f"the TRL peer does not have {'; '.join(other)}: take quickstart or word-problems as they are"
        )
    rollout, learner = recipe.rollout, recipe.learner
    if learner.mini_batch is not None or learner.epochs != 1:
        raise RecipeError("the TRL peer takes one optimiser step a batch: leave learner.mini_batch and epochs out")
    config = read_json(policy / "config.json", "make the starting policy again")
    loss, scale = LOSSES[preset]
    source, count = build_tasks(recipe), rollout.tasks_per_step
    order = TaskOrder(len(source), recipe.seed)
    chosen = [[source[order.index_at(step * count + i)] for i in range(count)] for step in range(steps)]
    return {
        "policy": str(policy),
        "form": {
            "group_size": rollout.group_size,
            "max_turns": rollout.max_turns or environment_maker(recipe)().max_turns,
            "max_tokens": recipe.sampling.max_tokens,
            "temperature": recipe.sampling.temperature,
            "context": config["max_position_embeddings"],
            "renderer": agent.renderer.options,
            "parser": agent.parser.options,
            "environment": recipe.environment.options,
        },
        "tasks": [
            [{"id": t.id, "prompt": t.prompt, "answer": t.answer, "family": t.family} for t in tasks]
            for tasks in chosen
        ],
        "rates": [learning_rate(learner, step, step / steps) for step in range(steps)],
        "loss": loss,
        "scale_rewards": scale,
        "betas": learner.betas,
        "eps": learner.eps,
        "weight_decay": learner.weight_decay,
        "clip_norm": learner.clip_norm,
        "clip": CLIP,
        "seed": recipe.seed,
        "dtype": str(pick_dtype(recipe.model.dtype, pick_device("cpu"))).removeprefix("torch."),
    }


def emitting_all(policy: Path, work: Path) -> Path:
    """The same policy without its set of output tokens: links to its files, but for the one that names the set."""
    folder = work / f"{policy.name}-all"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in policy.iterdir():
        if file.name != SIDECAR:
            (folder / file.name).symlink_to(file)
    return folder


def trl_python(venvs: Path) -> str:
    python = venvs.resolve() / "trl" / "bin" / "python"
    if not python.exists():
        raise RunError(f"there is no {python}: make bench-setup makes TRL's environment")
    return str(python)


def remaining(comparison: Comparison) -> Iterator[tuple[int, str]]:
    for run, side in report.schedule(comparison.options.sides, comparison.options.runs):
        if comparison.name(run, side) not in comparison.results.runs:
            yield run, side


def show(comparison: Comparison, console: Console) -> None:
    records, options = comparison.records(), comparison.options
    if not records:
        console.print(f"no run of this comparison is in {options.out}")
        return
    what = f"{options.recipe} from {options.start}, {options.threads} threads"
    if options.time_to_accuracy:
        for table in report.accuracy_tables(records, f"{what}; greedy, {options.tasks} tasks", options.accuracy):
            console.print(table)
    else:
        console.print(report.speed_table(records, f"{what}; {options.steps} timed steps a run; medians (min–max)"))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--recipe", choices=sorted(DEFAULTS), default="quickstart")
    add("--runs", type=int, help="default: 5; 1 with --time-to-accuracy or --quick")
    add("--steps", type=int, help="timed steps of a run, after one that warms up")
    add("--sides", nargs="+", choices=list(SIDES), default=["renma", "trl"], help=str(SIDES))
    add("--start", help="base, cold (after the recipe's cold start) or the folder of a policy that Renma saved")
    add("--micro-batch", type=int, help="trajectories whose gradient TRL computes at once")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override a leaf of the recipe, for both sides")
    add("--threads", type=int, default=os.cpu_count())
    add("--quick", action="store_true", help="one run of one small step")
    add("--time-to-accuracy", action="store_true")
    add("--updates", type=int, default=8, help="steps of a training for --time-to-accuracy")
    add("--every", type=int, default=2, help="steps between its measured policies")
    add("--tasks", type=int, default=200, help="tasks of the recipe's first evaluation set it is measured on")
    add("--accuracy", type=float, help="the accuracy to compare times at; default: all that both sides reached")
    add("--work", type=Path, default=Path("runs/benchmarks/end_to_end"), help="starting policies and passing files")
    add("--out", type=Path, default=Path("runs/benchmarks/end_to_end.json"))
    add("--venvs", type=Path, default=Path(os.environ.get("RENMA_BENCH_VENVS", ".venvs")))
    add("--table", action="store_true", help="print what is there; run nothing")
    options = parser.parse_args(arguments)
    usual = DEFAULTS[options.recipe]
    options.start = options.start or usual["start"]
    options.micro_batch = options.micro_batch or usual["micro_batch"]
    options.set = [*usual["set"], *(QUICK if options.quick else []), *options.set]
    options.steps = options.steps or (1 if options.quick else usual["steps"])
    options.runs = options.runs or (1 if options.quick or options.time_to_accuracy else 5)
    return options


def main() -> None:
    comparison = Comparison(parsed())
    console = Console()
    if not comparison.options.table:
        try:
            for run, side in remaining(comparison):
                print(f"run {run + 1} of {comparison.options.runs}: {side}", file=sys.stderr, flush=True)
                comparison.run(run, side)
        except (RunError, RecipeError) as error:
            raise SystemExit(f"error: {error}") from error
    show(comparison, console)


if __name__ == "__main__":
    main()
