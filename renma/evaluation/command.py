"""`renma eval`: measure a policy on the recipe's evaluation sets and print the table."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from renma.errors import RecipeError
from renma.evaluation.evaluate import EvaluationResult, evaluate
from renma.training.setup import Parts
from renma.training.sources import open_source
from renma.types import Trajectory


def evaluate_source(
    source: str,
    recipe: str | None,
    overrides: list[str],
    *,
    k: int = 1,
    temperature: float | None = None,
    limit: int | None = None,
    save: Path | None = None,
) -> list[EvaluationResult]:
    """Evaluate k attempts per task on every evaluation set. temperature None: 0 for one attempt, 1 for several."""
    heat = temperature if temperature is not None else (0.0 if k == 1 else 1.0)
    parts = open_source(source, recipe, overrides, {"evaluation.k": k, "evaluation.temperature": heat})
    if not parts.evaluation:
        raise RecipeError("the recipe has no evaluation.sets; add one with a name and a source")
    results = asyncio.run(parts.closing(_measure(parts, k, limit)))
    console = Console()
    console.print(table_of(results, f"{source}, temperature {heat:g}"))
    if save is not None:
        entries = [
            {"set": r.name, **r.summary(), "successes": list(r.successes), "stop_reasons": r.stop_reasons}
            for r in results
        ]
        save.write_text(json.dumps(entries, indent=1), encoding="utf-8")
        console.print(f"wrote {save}")
    return results


async def _measure(parts: Parts, k: int, limit: int | None) -> list[EvaluationResult]:
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for chosen in parts.evaluation:
            tasks = chosen.tasks[:limit]
            bar = progress.add_task(chosen.name, total=len(tasks) * k)

            def done(_: Trajectory, bar: Any = bar) -> None:
                progress.advance(bar)

            results.append(await evaluate(parts.evaluator, tasks, name=chosen.name, k=k, done=done))
    return results


def table_of(results: list[EvaluationResult], title: str) -> Table:
    table = Table(title=title)
    for heading in ("set", "tasks", "success", "95 % interval", "pass@k", "turns", "tokens", "endings"):
        table.add_column(heading, justify="left" if heading in ("set", "endings") else "right")
    for r in results:
        endings = ", ".join(f"{reason} {count}" for reason, count in sorted(r.stop_reasons.items()))
        table.add_row(
            r.name,
            str(r.n),
            f"{r.success:.1%}",
            f"{r.low:.1%} – {r.high:.1%}",
            f"{r.pass_at_k:.1%} (k={r.k})",
            f"{r.turns:.1f}",
            f"{r.tokens:.1f}",
            endings,
        )
    return table
