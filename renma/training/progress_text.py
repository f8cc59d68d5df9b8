"""The words of the progress view: lines, tables and episodes, from plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from renma.viewer.text import duration, number, percent, points, printable

STAGES = (("before", "before"), ("cold_start", "after cold start"), ("after", "after RL"))
NUMBERS = (  # metric, label, in percent
    ("success", "success", True),
    ("return_mean", "return", False),
    ("loss", "loss", False),
    ("entropy", "entropy", False),
    ("grad_norm", "grad", False),
    ("zero_std_share", "no signal", True),
)
LONGEST_TEXT = 1200  # characters of one action or observation
BLOCKS = "▁▂▃▄▅▆▇█"


def metric(metrics: Mapping[str, Any], name: str) -> float | None:
    """A metric by its name or as `learner/<name>`; None when it was not logged."""
    value = metrics.get(name, metrics.get(f"learner/{name}"))
    return float(value) if isinstance(value, int | float) else None


def step_numbers(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers worth watching, as (label, value): learning first, then tokens per second by phase."""
    shown = []
    for name, label, in_percent in NUMBERS:
        value = metric(metrics, name)
        if value is not None:
            shown.append((label, percent(value) if in_percent else number(value)))
    for name in sorted(metrics):
        value = metric(metrics, name)
        if name.startswith("tokens_per_second") and value is not None:
            phase = name.removeprefix("tokens_per_second").strip("_/")
            shown.append((f"tok/s {phase}".strip(), number(value)))
    return shown


def step_line(metrics: Mapping[str, Any], total: int, time_left: float | None) -> str:
    """One step as one line for a log file."""
    of = f"/{total}" if total else ""
    head = f"step {int(metrics.get('step', 0)):>{len(str(total))}}{of}"
    seconds = [(name, metric(metrics, f"seconds_{name}")) for name in ("rollout", "learn")]
    times = [f"{name} {value:.1f} s" for name, value in seconds if value is not None]
    parts = [head, *(f"{label} {value}" for label, value in step_numbers(metrics)), *times]
    if time_left is not None:
        parts.append(f"{duration(time_left)} left")
    return "  ".join(parts)


def evaluation_line(set_name: str, result: Mapping[str, Any]) -> str:
    """`svamp after: 19.8 % [16.2, 24.1], 300 tasks`."""
    line = f"{printable(set_name)}: {percent(float(result['success']))} {interval_text(result)}".rstrip()
    return f"{line}, {result['n']} tasks" if "n" in result else line


def interval_text(entry: Mapping[str, Any]) -> str:
    """The interval in percent: `[19.7, 29.4]`; empty where there is none."""
    low, high = entry.get("low"), entry.get("high")
    if isinstance(low, int | float) and isinstance(high, int | float):
        return f"[{100 * low:.1f}, {100 * high:.1f}]"
    return ""


def facts_table(name: str, facts: Sequence[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, value in facts:
        table.add_row(Text(printable(label)), Text(printable(value)))
    return Group(Text(printable(name), style="bold"), Padding(table, (0, 0, 1, 2), expand=False))


def comparison_table(sets: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> RenderableType:
    """For each set its stages with their intervals; each change is to the row above, so that RL's part stands alone."""
    table = Table(box=box.SIMPLE_HEAD, title="Success on held-out tasks", title_justify="left", title_style="bold")
    table.add_column("set")
    table.add_column("", no_wrap=True)
    table.add_column("success", justify="right", no_wrap=True)
    table.add_column("95% interval", justify="right", no_wrap=True)
    table.add_column("points", justify="right", no_wrap=True)
    for name, stages in sets.items():
        present = [(stage, label) for stage, label in STAGES if stage in stages]
        for position, (stage, label) in enumerate(present):
            here = stages[stage]
            change = _change(stages[present[position - 1][0]], here) if position else ""
            tasks = f"{here['n']} tasks" if position == 1 and "n" in here else ""
            first = Text(printable(name)) if position == 0 else Text(tasks, "dim")
            table.add_row(first, label, percent(float(here["success"])), interval_text(here), change)
        if len(present) > 2:
            table.add_row("", "in all", "", "", Text(_change(stages[present[0][0]], stages[present[-1][0]]), "bold"))
        table.add_section()
    return table


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return points(float(after["success"]) - float(before["success"]))


def episode(sample: Mapping[str, Any], number_of: int) -> RenderableType:
    """One episode: what the agent wrote (trained on) bold and green, what it was shown dim."""
    solved = sample.get("success")
    verdict = "not judged" if solved is None else "solved" if solved else "not solved"
    head = [f"episode {number_of}", verdict]
    if isinstance(sample.get("return"), int | float):
        head.append(f"return {number(float(sample['return']))}")
    if sample.get("stop_reason"):
        head.append(str(sample["stop_reason"]).replace("_", " "))
    body = Text()
    _append(body, "  ", sample.get("task", ""), "dim")
    steps = sample.get("steps")
    for step in steps if isinstance(steps, Sequence) else ():
        _append(body, "▌ ", step.get("action", ""), "bold green")
        _append(body, "  ", step.get("observation", ""), "dim")
    body.rstrip()
    return Group(Text(printable(" · ".join(head)), style="bold"), body, Text())


def _append(body: Text, margin: str, text: object, style: str) -> None:
    for line in printable(str(text).rstrip("\n"), LONGEST_TEXT).split("\n") if text else ():
        body.append(f"{margin}{line}\n", style=style)


def sparkline(values: Sequence[float], width: int) -> str:
    """Shares in [0, 1] as a row of at most `width` blocks; neighbours are averaged."""
    size = -(-len(values) // width) if values else 1
    means = [sum(run) / len(run) for run in (values[i : i + size] for i in range(0, len(values), size))]
    return "".join(BLOCKS[min(len(BLOCKS) - 1, max(0, int(mean * len(BLOCKS))))] for mean in means)
