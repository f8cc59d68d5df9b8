"""What an update costs: one batch of 64 recorded trajectories as a prefix tree, and row by row; time, MFU and memory.

    python -m benchmarks.learning                            # word-problems' policy (Gemma-3-270M); about an hour
    python -m benchmarks.learning --model quickstart         # the quickstart's policy: minutes
    python -m benchmarks.learning --quick                    # 2 tasks, 1 round: does it run?
    python -m benchmarks.learning --table                    # print what is there; run nothing

The batch (8 tasks x 8 members) is sampled once by the recipe's own rollout and kept beside the results (--rows takes
another). Every measurement is a process of its own, which learns from two rows to warm up, then from the batch once,
optimiser step included; rounds go through all cases in turn, and the table has medians. Three ways: `tree`, the
learner as it is; `separate`, the same learner with each row a pack of its own; `padded`, rows in padded batches
(padded_rows.py). FLOPs: learner_cost.py; MFU is against the matrix product's peak, measured in the same process.
Memory is the process's peak during the update, less what Python and torch held before the policy was loaded; `held` is
what stays between updates (weights, masters, moments); `mapped` in the file is the part of both that is pages of files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.learner_cost import distinct, matmul_peak, size_of, update_flops
from benchmarks.padded_rows import padded_positions, padded_update
from benchmarks.recorded_rows import load_rows, record, save_rows
from benchmarks.tiny_runs import Results
from renma.learning.learner import Learner
from renma.learning.lora import apply_lora
from renma.learning.losses import reinforce
from renma.learning.rows import Row
from renma.models.policy import Policy, load_policy
from renma.recipe import Recipe
from renma.recipe_load import load_recipe
from renma.recipes import find_recipe
from renma.seeding import seed_for
from renma.training.setup import build_tasks, training_texts

# (what is trained, tokens the policy emits, way): what the table shows.
CASES = (
    ("full", "tasks", "tree"),
    ("full", "tasks", "separate"),
    ("full", "tasks", "padded"),
    ("lora", "tasks", "tree"),
    ("lora", "tasks", "separate"),
    ("full", "all", "tree"),
    ("full", "all", "separate"),
    ("lora", "all", "tree"),
)
SINGLE = 16  # max_positions under which every row of more tokens is a pack of its own
LORA = "model.lora={rank: 16}"


def overrides(trained: str, outputs: str) -> list[str]:
    return [f"model.output_tokens={outputs}", *([LORA] if trained == "lora" else [])]


def measure(model: str, trained: str, outputs: str, way: str, rows: Sequence[Row], micro: int) -> dict[str, Any]:
    """One update, in this process."""
    peak = matmul_peak()
    before, files = resident("VmRSS"), resident("RssFile")
    recipe = load_recipe(find_recipe(model), overrides(trained, outputs))
    policy = policy_of(recipe)
    settings = recipe.learner
    if way == "separate":
        settings = settings.model_copy(update={"max_positions": SINGLE})
    learner = Learner(
        policy.model,
        settings.model_copy(update={"schedule": "constant", "warmup_steps": 0, "mini_batch": None}),
        output_ids=policy.output_ids,
        temperature=recipe.sampling.temperature,
        compute_dtype=policy.compute_dtype,
    )

    def update(batch: Sequence[Row]) -> dict[str, float]:
        if way == "padded":
            return padded_update(learner, batch, micro, policy.output_ids, recipe.sampling.temperature)
        return learner.update(batch, loss=reinforce())

    update(rows[:2])
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here
    held = resident("VmRSS")
    started = time.perf_counter()
    found = update(rows)
    seconds = time.perf_counter() - started
    highest = resident("VmHWM")
    if way == "padded":
        positions = padded_positions(rows, micro)
        depths = np.concatenate([np.arange(len(row) - 1) for row in rows])
        predictors = sum(int(np.count_nonzero(row.trained)) for row in rows)
    else:
        packs = learner.scorer.tree.packs(list(rows), settings.max_positions)
        positions = sum(tree.positions for tree in packs)
        assert positions == found["positions"]
        depths = np.concatenate([tree.position_ids for tree in packs])
        predictors = sum(len(tree.predictors) for tree in packs)
    flops = update_flops(size_of(policy.model, policy.output_ids), depths, predictors)
    return {
        "model": model,
        "trained": trained,
        "outputs": outputs,
        "way": way,
        "trajectories": len({row.trajectory for row in rows}),
        "positions": positions,
        "distinct": distinct(rows).positions,
        "row_tokens": sum(map(len, rows)),
        "seconds": seconds,
        "flops": flops,
        "peak_flops": peak,
        "mfu": flops / seconds / peak,
        "memory": highest - before,
        "held": held - before,
        "mapped": resident("RssFile") - files,
        "output_tokens": size_of(policy.model, policy.output_ids).outputs,
        "loss": found["loss"],
        "grad_norm": found["grad_norm"],
        "threads": torch.get_num_threads(),
    }


def policy_of(recipe: Recipe) -> Policy:
    """The recipe's policy, adapters in place; no engine is made."""
    texts = training_texts(recipe, build_tasks(recipe))
    policy = load_policy(recipe.model, texts=lambda: texts, seed=seed_for(recipe.seed, "model"))
    if recipe.model.lora is not None:
        policy.model = apply_lora(policy.model, recipe.model.lora)
    return policy


def resident(field: str) -> int:
    """Bytes of this process's memory: VmRSS, now; RssFile, of that in files' pages; VmHWM, the most since cleared."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only")


def in_a_process(model: str, case: Sequence[str], rows: Path, micro: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.learning", "--model", model, "--rows", str(rows)]
    command += ["--micro", str(micro), "--one", *case]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise SystemExit(f"{' '.join(case)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def show(runs: Sequence[dict[str, Any]], console: Console) -> None:
    first = runs[0]
    peak = statistics.median(run["peak_flops"] for run in runs)
    table = Table(
        title=f"{first['model']}: {first['trajectories']} trajectories, {first['row_tokens']:,} tokens in rows, "
        f"{first['distinct']:,} distinct positions; matmul peak {peak / 1e9:,.0f} GFLOP/s, {first['threads']} threads"
    )
    columns = ("trained", "emits", "way", "positions", "of distinct", "seconds", "(range)", "trajectories/s")
    for name in (*columns, "TFLOP", "MFU", "peak GB", "held GB", "tree is faster", "runs"):
        table.add_column(name, justify="left" if name in ("trained", "way") else "right")
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["trained"], run["outputs"], run["way"]), []).append(run)
    for (trained, outputs, way), found in sorted(groups.items(), key=lambda item: CASES.index(item[0])):
        seconds = statistics.median(run["seconds"] for run in found)
        tree = groups.get((trained, outputs, "tree"))
        ratio = seconds / statistics.median(run["seconds"] for run in tree) if tree else float("nan")
        run = found[0]
        table.add_row(
            trained,
            f"{run['output_tokens']:,}",
            way,
            f"{run['positions']:,}",
            f"{run['positions'] / run['distinct']:.2f}",
            f"{seconds:.2f}",
            f"{min(r['seconds'] for r in found):.2f}-{max(r['seconds'] for r in found):.2f}",
            f"{run['trajectories'] / seconds:.2f}",
            f"{run['flops'] / 1e12:.3f}",
            f"{statistics.median(r['mfu'] for r in found):.0%}",
            f"{statistics.median(r['memory'] for r in found) / 1e9:.2f}",
            f"{statistics.median(r['held'] for r in found) / 1e9:.2f}",
            "" if way == "tree" else f"{ratio:.1f}x",
            str(len(found)),
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="word-problems", help="a recipe: its policy, tasks and environment")
    parser.add_argument("--rows", type=Path, help="rows to learn from (.npz); default: recorded beside --out")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro", type=int, default=8, help="rows of a padded batch")
    parser.add_argument("--only", nargs="*", default=[], help="cases with these words alone, such as: lora tree")
    parser.add_argument("--out", type=Path, default=Path(".benchmarks/learning.json"))
    parser.add_argument("--quick", action="store_true", help="2 tasks, 1 round, in files of its own")
    parser.add_argument("--table", action="store_true", help="print what is there; run nothing")
    parser.add_argument("--one", nargs=3, metavar=("TRAINED", "EMITS", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        trained, outputs, way = arguments.one
        rows = load_rows(arguments.rows)
        print(json.dumps(measure(arguments.model, trained, outputs, way, rows, arguments.micro)))
        return
    console = Console(width=max(Console().width, 150))
    if arguments.quick:
        arguments.tasks, arguments.rounds = 2, 1
        arguments.out = arguments.out.with_name(arguments.out.stem + "-quick.json")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    name = f"{Path(arguments.model).stem}-{arguments.tasks}x{arguments.members}"
    path = arguments.rows or arguments.out.with_name(f"rows-{name}.npz")
    results = Results(arguments.out)
    if not arguments.table:
        if not path.is_file():
            console.print(f"recording the rows of {arguments.tasks} x {arguments.members} trajectories: {path}")
            recipe = load_recipe(find_recipe(arguments.model), overrides("full", "tasks"))  # fits both heads
            save_rows(path, record(recipe, arguments.tasks, arguments.members))
        cases = [case for case in CASES if set(arguments.only) <= set(case)]
        planned = [(number, case) for number in range(arguments.rounds) for case in cases]
        todo = [(number, case) for number, case in planned if key(path, case, number) not in results.runs]
        for number, case in track(todo, f"updates of {name}", console=console):
            results.add(key(path, case, number), in_a_process(arguments.model, case, path.resolve(), arguments.micro))
    mine = [run for name, run in results.runs.items() if name.startswith(path.stem + "/")]
    if not mine:
        console.print(f"{arguments.out} has no run of {path.stem}")
        return
    show(mine, console)


def key(rows: Path, case: Sequence[str], number: int) -> str:
    return "/".join((rows.stem, *case, str(number)))


if __name__ == "__main__":
    main()
