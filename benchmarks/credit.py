"""Which credit learns a long-horizon task fastest: algorithms x horizons x seeds at equal environment steps.

    python benchmarks/credit.py --out credit.json --tune               # first: learning rates, with a seed of their own
    python benchmarks/credit.py --out credit.json                      # the whole table; goes on where it stopped
    python benchmarks/credit.py --out credit.json --horizons 4 --algorithms grpo steppo --seeds 2
    python benchmarks/credit.py --out credit.json --table              # print what is there

The task is the corridor of corridor.py: delayed reward, four-token actions, repeated states. Every run of one seed
starts from one policy, cold-started on demonstrations of all horizons by someone who knows two signs of three, and may
use `STEPS_PER_DOOR` environment steps for each door, those of refills and discarded groups included. All share one
recipe (tiny_runs.py) but for the learning rate: each algorithm's best of `RATES` at `TUNING_DOORS` doors with
`TUNING_SEED`, which is not among the seeds reported; `RATE` where the file has no tuning. Success is measured at
temperature 1, as the policy was trained, on the same corridors for all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.tiny_runs import STEPS_PER_DOOR, Results, parsed, run, starting_policy
from renma.evaluation.statistics import estimate_mean, sign_flip

HORIZONS = (4, 8, 16)
TUNING_SEED, TUNING_DOORS = 100, 8
RATES = (5e-4, 1e-3, 2e-3)
RATE = 1e-3
KEPT = ("learner/entropy", "learner/grad_norm", "learner/clip_share", "critic/explained_variance")


def _token(gamma: float, lam: float = 0.95) -> dict[str, Any]:
    return {"preset": "ppo", "advantage": {"type": "gae_token", "gamma": gamma, "lam": lam}}


def _step(gamma: float, lam: float = 0.95) -> dict[str, Any]:
    return {"preset": "steppo", "advantage": {"type": "gae_step", "gamma": gamma, "lam": lam}}


ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo"},
    "rloo": {"preset": "rloo"},
    "reinforce++": {"preset": "reinforce_pp"},
    "dapo": {"preset": "dapo"},
    "gigpo": {"preset": "gigpo"},
    "ppo-token": _token(0.99),
    "ppo-token-1": _token(1.0, 1.0),  # gamma = lambda = 1: the return minus the critic's value
    "ppo-token-0.95": _token(0.95),
    "steppo": _step(0.99),
    "steppo-0.95": _step(0.95),
    # the step ratio is a mean over tokens, so PPO's bounds let one decisive token move much further
    "steppo-wide": {**_step(0.99), "loss": {"type": "step_ratio", "low": 0.8, "high": 1.2}},
    "steppo-wide-0.95": {**_step(0.95), "loss": {"type": "step_ratio", "low": 0.8, "high": 1.2}},
    # StepPO's estimator with PPO's loss: what of the difference is the credit's, and what the ratio's
    "steppo-clip": {**_step(0.99), "preset": "ppo"},
}
LEVEL = {"step": ("steppo", "gigpo"), "token": ("ppo-token", "ppo-token-1"), "trajectory": ("grpo", "rloo", "dapo")}


def one_run(
    doors: int, name: str, seed: int, rate: float, arguments: argparse.Namespace, **more: Any
) -> dict[str, Any]:
    policy = starting_policy(HORIZONS, seed, arguments.policies)
    result = run(doors, seed, ALGORITHMS[name], policy, rate, budget=arguments.budget, keep=KEPT, **more)
    return {"algorithm": name, "rate": rate, **result}


def measure(arguments: argparse.Namespace, results: Results, console: Console) -> None:
    """Every run that is asked for and not there yet, one after the other."""
    plan = [
        (doors, name, seed, rate)
        for seed in ([TUNING_SEED] if arguments.tune else range(arguments.seeds))
        for doors in ([TUNING_DOORS] if arguments.tune else arguments.horizons)
        for name in arguments.algorithms
        for rate in (RATES if arguments.tune else [rate_of(name, results)])
    ]
    left = [entry for entry in plan if _key(*entry) not in results.runs]
    if len(left) < len(plan):
        console.print(f"{len(plan) - len(left)} of {len(plan)} runs are in {results.path} already")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        whole = progress.add_task("runs", total=len(left), note="")
        one = progress.add_task("", total=100, note="")
        for doors, name, seed, rate in left:
            progress.update(one, description=f"{doors} doors, {name}, seed {seed}", completed=0, note="")
            started = time.perf_counter()

            def report(text: str, share: float) -> None:
                progress.update(one, completed=int(100 * share), note=text)

            result = one_run(doors, name, seed, rate, arguments, progress=report)
            results.add(_key(doors, name, seed, rate), result)
            console.print(
                f"{doors:>2} doors  {name:<15} seed {seed}  rate {rate:g}  success {result['start']:.2f} -> "
                f"{result['success']:.2f}  area {result['area']:.2f}  {time.perf_counter() - started:.0f} s"
            )
            if result["ended"]:
                console.print(f"   ended after {result['environment_steps']} environment steps: {result['ended']}")
            progress.advance(whole)


def _key(doors: int, name: str, seed: int, rate: float) -> str:
    return f"{doors}/{name}/{seed}/{rate:g}"


def tuned(results: Results) -> dict[str, dict[float, float]]:
    """For each algorithm, the area of each learning rate that was tried with the tuning seed."""
    areas: dict[str, dict[float, float]] = {}
    for r in results.runs.values():
        if r["seed"] == TUNING_SEED and r["doors"] == TUNING_DOORS:
            areas.setdefault(r["algorithm"], {})[r["rate"]] = r["area"]
    return areas


def rate_of(name: str, results: Results) -> float:
    """The algorithm's best learning rate by the tuning that is in the file; without one, `RATE`."""
    areas = tuned(results).get(name, {})
    return max(areas, key=lambda rate: areas[rate]) if areas else RATE


# -- tables ------------------------------------------------------------------------------------------------------------


def reported(results: Results) -> list[dict[str, Any]]:
    """The runs with the algorithm's own rate; tuning runs are not among them."""
    rates = {name: rate_of(name, results) for name in ALGORITHMS}
    return [
        r for r in results.runs.values() if r["seed"] != TUNING_SEED and r["rate"] == rates.get(r["algorithm"], -1.0)
    ]


def show(results: Results, console: Console) -> None:
    runs = reported(results)
    horizons = sorted({r["doors"] for r in runs})
    names = [name for name in ALGORITHMS if any(r["algorithm"] == name for r in runs)]
    for key, title in (
        ("success", "success after training [95 % interval over seeds and tasks]"),
        ("area", "mean success while training: area under the curve [95 % interval over seeds]"),
    ):
        estimate = _estimate_wins if key == "success" else _estimate_areas
        table = Table(title=title)
        table.add_column("algorithm")
        for doors in horizons:
            table.add_column(f"{doors} doors", justify="right")
        for name in names:
            table.add_row(name, *[estimate(_of(runs, name, doors)) for doors in horizons])
        if key == "success":
            starts = [[r["start"] for r in _first(runs, doors)] for doors in horizons]
            table.add_row("before training", *[f"{np.mean(values):.2f}" for values in starts])
        console.print(table)
    console.print(comparisons(runs, horizons))
    console.print(
        f"Budget: {STEPS_PER_DOOR} environment steps a door unless --budget said otherwise. Intervals are bootstraps; "
        "over five seeds they are rough. p: sign flips of the differences paired by horizon and seed."
    )


def _of(runs: Sequence[dict[str, Any]], name: str, doors: int) -> list[dict[str, Any]]:
    return sorted((r for r in runs if r["algorithm"] == name and r["doors"] == doors), key=lambda r: r["seed"])


def _first(runs: Sequence[dict[str, Any]], doors: int) -> list[dict[str, Any]]:
    """One run for each seed: they all begin alike."""
    return list({r["seed"]: r for r in runs if r["doors"] == doors}.values())


def _estimate_areas(runs: Sequence[dict[str, Any]]) -> str:
    if len(runs) < 2:
        return f"{runs[0]['area']:.2f}" if runs else "-"
    found = estimate_mean([r["area"] for r in runs])
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _estimate_wins(runs: Sequence[dict[str, Any]], draws: int = 4000) -> str:
    """Seeds and tasks are both drawn again: tasks are the same for all seeds."""
    if not runs:
        return "-"
    wins = np.array([r["wins"] for r in runs], dtype=np.float64)
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, len(wins), (draws, len(wins)))
    shares = rng.multinomial(wins.shape[1], np.full(wins.shape[1], 1 / wins.shape[1]), draws) / wins.shape[1]
    low, high = np.quantile((wins[seeds].mean(1) * shares).sum(1), [0.025, 0.975])
    return f"{wins.mean():.2f} [{low:.2f}, {high:.2f}]"


def comparisons(runs: Sequence[dict[str, Any]], horizons: Sequence[int]) -> Table:
    """The published claims as paired differences over equal (horizon, seed)."""
    table = Table(title="paired differences in mean success while training, in percentage points")
    table.add_column("claim")
    for doors in horizons:
        table.add_column(f"{doors} doors", justify="right")
    table.add_column("all", justify="right")
    table.add_column("p", justify="right")
    pairs = [
        ("step credit over token credit", LEVEL["step"], LEVEL["token"]),
        ("step credit over trajectory credit", LEVEL["step"], LEVEL["trajectory"]),
        ("  steppo over ppo-token", ("steppo",), ("ppo-token",)),
        ("  steppo-clip over ppo-token (credit alone)", ("steppo-clip",), ("ppo-token",)),
        ("  steppo over ppo-token-1", ("steppo",), ("ppo-token-1",)),
        ("  steppo over grpo", ("steppo",), ("grpo",)),
        ("  gigpo over grpo", ("gigpo",), ("grpo",)),
        ("gamma 0.99 over 0.95, token GAE", ("ppo-token",), ("ppo-token-0.95",)),
        ("gamma 0.99 over 0.95, step GAE", ("steppo",), ("steppo-0.95",)),
        ("bounds of 0.05 over 0.2, step ratio", ("steppo", "steppo-0.95"), ("steppo-wide", "steppo-wide-0.95")),
    ]
    for claim, better, worse in pairs:
        by_horizon = {doors: _differences(runs, better, worse, doors) for doors in horizons}
        everything = [d for values in by_horizon.values() for d in values]
        if not everything:
            continue
        p = sign_flip(np.zeros(len(everything)), everything).p_value
        cells = [f"{100 * np.mean(values):+.1f}" if values else "-" for values in by_horizon.values()]
        table.add_row(claim, *cells, f"{100 * np.mean(everything):+.1f}", f"{p:.3f}")
    return table


def _differences(
    runs: Sequence[dict[str, Any]], better: Sequence[str], worse: Sequence[str], doors: int
) -> list[float]:
    """For each seed that all of both sides have: the mean area of the one side minus that of the other."""

    def areas(name: str) -> dict[int, float]:
        return {r["seed"]: r["area"] for r in _of(runs, name, doors)}

    sides = [[areas(name) for name in side] for side in (better, worse)]
    shared = set.intersection(*(set(one) for side in sides for one in side))
    return [float(np.mean([o[s] for o in sides[0]]) - np.mean([o[s] for o in sides[1]])) for s in sorted(shared)]


def show_tuning(results: Results, console: Console) -> None:
    table = Table(title=f"mean success while training, {TUNING_DOORS} doors, seed {TUNING_SEED}")
    table.add_column("algorithm")
    for rate in RATES:
        table.add_column(f"{rate:g}", justify="right")
    for name, areas in tuned(results).items():
        table.add_row(name, *[f"{areas[rate]:.3f}" if rate in areas else "-" for rate in RATES])
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--horizons", nargs="+", type=int, default=list(HORIZONS), choices=HORIZONS, metavar="DOORS")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tune", action="store_true", help="measure the learning rates instead, with the tuning seed")
    arguments = parsed(parser, "credit.json")
    console, results = Console(), Results(arguments.out)
    if not arguments.table:
        measure(arguments, results, console)
    (show_tuning if arguments.tune else show)(results, console)


if __name__ == "__main__":
    main()
