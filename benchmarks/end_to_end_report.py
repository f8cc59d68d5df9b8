"""What the runs of end_to_end.py come to: figures of a run, ratios of medians, times to an accuracy, tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

OURS = "renma"
ROWS = (  # label, figure, decimals
    ("trajectories/s into gradients", "trajectories_per_second", 3),
    ("sampled tokens/s", "tokens_per_second", 1),
    ("seconds a step", "seconds", 2),
    ("  generation (environments included)", "generation", 2),
    ("  learning, and all else", "learning", 2),
    ("peak memory, GB", "peak_gb", 2),
    ("turns an episode", "turns", 2),
    ("sampled tokens an episode", "tokens", 1),
    ("success, sampled", "success", 3),
    ("groups with a signal", "mixed", 3),
)


def schedule(sides: Sequence[str], runs: int) -> Iterator[tuple[int, str]]:
    """(run, side): every side once a run, each run begun by the next one, so that none always comes first."""
    for run in range(runs):
        for offset in range(len(sides)):
            yield run, sides[(run + offset) % len(sides)]


def figures(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one run over its timed steps; rates are sums over sums."""
    steps = record["steps"][record["warm_up"] :]
    if not steps:
        raise ValueError(f"run {record['run']} of {record['side']} has no timed step")
    seconds, trajectories, tokens = (sum(s[k] for s in steps) for k in ("seconds", "trajectories", "sampled_tokens"))
    generation = sum(step["generation"] for step in steps)
    return {
        "trajectories_per_second": trajectories / seconds,
        "tokens_per_second": tokens / seconds,
        "seconds": seconds / len(steps),
        "generation": generation / len(steps),
        "learning": (seconds - generation) / len(steps),
        "peak_gb": record["peak_bytes"] / 1e9,
        "turns": statistics.mean(step["turns"] for step in steps),
        "tokens": tokens / trajectories,
        "success": statistics.mean(step["success"] for step in steps),
        "mixed": statistics.mean(step["mixed"] for step in steps),
    }


def by_side(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, dict[str, float]]]:
    """side -> run -> figures."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for record in records:
        found.setdefault(record["side"], {})[record["run"]] = figures(record)
    return found


def ratio(
    ours: Mapping[int, Mapping[str, float]], theirs: Mapping[int, Mapping[str, float]], key: str
) -> tuple[float, float, float]:
    """ours / theirs: the ratio of medians over all runs, then the least and the greatest of the runs both have."""
    both = sorted(set(ours) & set(theirs))
    if not both:
        raise ValueError("the sides have no run in common")
    of_runs = [ours[run][key] / theirs[run][key] for run in both]
    middle = statistics.median(f[key] for f in ours.values()) / statistics.median(f[key] for f in theirs.values())
    return middle, min(of_runs), max(of_runs)


def speed_table(records: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Medians of each side with least and greatest, and under them the ratios to ours."""
    sides = by_side(records)
    table = Table(title=title)
    table.add_column("")
    for side, runs in sides.items():
        table.add_column(f"{side} (n={len(runs)})", justify="right")
    for label, key, decimals in ROWS:
        table.add_row(label, *[spread([f[key] for f in runs.values()], decimals) for runs in sides.values()])
    if OURS in sides:
        cells = []
        for side, runs in sides.items():
            if side == OURS or not set(runs) & set(sides[OURS]):
                cells.append("")
                continue
            cells.append("{:.1f}× ({:.1f}–{:.1f})".format(*ratio(sides[OURS], runs, "trajectories_per_second")))
        table.add_section()
        table.add_row(f"{OURS} is faster by", *cells)
    return table


def spread(values: Sequence[float], decimals: int) -> str:
    """`median (least–greatest)`."""
    middle = f"{statistics.median(values):,.{decimals}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.{decimals}f}–{max(values):,.{decimals}f})"


def curve(record: Mapping[str, Any]) -> list[tuple[float, float, int]]:
    """(training seconds, accuracy, step) at each saved policy of a run, the start first."""
    clock, points = 0.0, []
    accuracy = {int(step): value for step, value in record["accuracy"].items()}
    for step in range(len(record["steps"]) + 1):
        clock += record["steps"][step - 1]["seconds"] if step else 0.0
        if step in accuracy:
            points.append((clock, accuracy[step], step))
    return points


def first_time(points: Sequence[tuple[float, float, int]], accuracy: float) -> float | None:
    """The training seconds when `accuracy` was first measured or exceeded; None: never."""
    return next((seconds for seconds, reached, _ in points if reached >= accuracy), None)


def levels(curves: Sequence[Sequence[tuple[float, float, int]]]) -> list[float]:
    """The accuracies above the start that every curve reaches: each new best of the curve whose best is lowest."""
    if not curves:
        return []
    lowest = min(curves, key=lambda points: max(value for _, value, _ in points))
    start = max(points[0][1] for points in curves)
    best, found = start, []
    for _, value, _ in lowest:
        if value > best:
            found.append(value)
            best = value
    return found


def accuracy_tables(records: Sequence[Mapping[str, Any]], title: str, wanted: float | None = None) -> list[Table]:
    """Accuracy over training seconds, and the seconds each side took to the accuracies that all reached."""
    over_time = Table(title=title)
    for name in ("run", "side", "step", "training seconds", "accuracy"):
        over_time.add_column(name, justify="left" if name == "side" else "right")
    curves = {(record["run"], record["side"]): curve(record) for record in records}
    for (run, side), points in curves.items():
        for seconds, value, step in points:
            over_time.add_row(str(run), side, str(step), f"{seconds:,.0f}", f"{value:.3f}")
    times = Table(title="training seconds to an accuracy")
    for name in ("run", "accuracy"):
        times.add_column(name, justify="right")
    sides = list(dict.fromkeys(side for _, side in curves))
    for side in sides:
        times.add_column(side, justify="right")
    for run in sorted({run for run, _ in curves}):
        own = {side: curves[run, side] for side in sides if (run, side) in curves}
        for level in [wanted] if wanted is not None else levels(list(own.values())):
            reached = {side: first_time(points, level) for side, points in own.items()}
            times.add_row(str(run), f"{level:.3f}", *[_time_cell(reached, side) for side in sides])
    return [over_time, times]


def _time_cell(reached: Mapping[str, float | None], side: str) -> str:
    seconds, ours = reached.get(side), reached.get(OURS)
    if seconds is None:
        return "not reached" if side in reached else ""
    return f"{seconds:,.0f}" if side == OURS or not ours else f"{seconds:,.0f} ({seconds / ours:.1f}×)"
