"""Tables of benchmarks/sampling.py's results, and which claims about Renma's engine they do not bear out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.sampling_jobs import ratio, summary
from renma.inference.local.prefix import WORTH_A_FORWARD

OCCUPANCY = 0.9  # share of slots busy while episodes wait
SAMPLER = 0.15  # of the time of a round, over a vocabulary of
LARGE = 200_000  # tokens and more
Runs = Mapping[str, dict[str, Any]]


def print_tables(runs: Runs, console: Console) -> None:
    recipes = sorted({run["recipe"] for run in runs.values()}, reverse=True)
    for recipe in recipes:
        own = [run for run in runs.values() if run["recipe"] == recipe]
        for kind, show in (("job", _speeds), ("tuned", _tuned), ("shares_of", _shares)):
            chosen = [run for run in own if kind in run]
            if chosen:
                console.print(show(recipe, chosen))


def _speeds(recipe: str, runs: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{recipe}: tokens a second, median; Renma over a peer: median of the ratios within a round")
    for column in ("scenario", "engine", "runs", "tokens/s", "Renma over it", "mean log-prob", "slots busy", "prompts"):
        table.add_column(column, justify="left" if column in ("scenario", "engine") else "right")
    for job, engines in summary(runs).items():
        for engine, numbers in engines.items():
            over = None if engine == "renma" else ratio(runs, job, "renma", engine)
            table.add_row(
                job,
                engine,
                f"{numbers['runs']:.0f}",
                f"{numbers['tokens_per_second']:,.1f}",
                "" if over is None else f"{over:.2f}",
                f"{numbers['mean_logprob']:.3f}",
                _occupancy(numbers),
                f"{numbers['computed']:,.0f} / {numbers['needed']:,.0f} of {numbers['whole']:,.0f}"
                if "computed" in numbers
                else "",
            )
        for engine, whole, over in unmasked(runs, job):
            table.add_row(job, f"{engine}, all tokens", "", f"{whole:,.1f}", f"{over:.2f}", "", "", "")
    table.caption = (
        "slots busy: while episodes wait for one (to the end of the job). prompts: positions computed / needed, "
        "of all that the prompts hold"
    )
    return table


def _occupancy(numbers: Mapping[str, float]) -> str:
    if "occupancy" not in numbers:
        return ""
    waiting = numbers["occupancy_waiting"]
    return f"{'' if math.isnan(waiting) else f'{waiting:.1%} '}({numbers['occupancy']:.1%})"


def unmasked(runs: list[dict[str, Any]], job: str) -> list[tuple[str, float, float]]:
    """For a `tasks` job: each peer's median speed without the mask, on the same prompts, and Renma's ratio to it."""
    kind, _, count = job.partition("-")
    if kind != "tasks":
        return []
    same = [{**run, "job": job} for run in runs if run["job"] == f"full-{count}" and run["engine"] != "renma"]
    ours = [run for run in runs if run["job"] == job and run["engine"] == "renma"]
    found = []
    for engine, numbers in summary(same).get(job, {}).items():
        over = ratio([*same, *ours], job, "renma", engine)
        if over is not None:
            found.append((engine, numbers["tokens_per_second"], over))
    return found


def _tuned(recipe: str, runs: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{recipe}: tokens a second by sequences at once")
    counts = sorted({run["at_once"] for run in runs})
    table.add_column("engine")
    for count in counts:
        table.add_column(str(count), justify="right")
    for engine in dict.fromkeys(run["tuned"] for run in runs):
        speeds = {run["at_once"]: run["tokens"] / run["seconds"] for run in runs if run["tuned"] == engine}
        table.add_row(engine, *[f"{speeds[count]:,.1f}" if count in speeds else "" for count in counts])
    return table


def _shares(recipe: str, runs: list[dict[str, Any]]) -> Table:
    first = runs[0]
    table = Table(
        title=f"{recipe}: a round of decoding; {first['threads']} threads, matmul peak {first['peak']:,.0f} GFLOP/s"
    )
    parts = list(first["seconds"])
    for column in ("tokens", "sequences", "tokens/s", "ms", *parts, "MLP+attention GFLOP/s", "head GFLOP/s"):
        table.add_column(column, justify="right")
    for run in sorted(runs, key=lambda run: (run["shares_of"], run["concurrency"])):
        whole = sum(run["seconds"].values())
        rates = [
            f"{run[kind]:,.0f} ({run[kind] / run['peak']:.0%})" if run[kind] else ""
            for kind in ("products_gflops", "head_gflops")
        ]
        table.add_row(
            run["shares_of"],
            str(run["concurrency"]),
            f"{run['tokens_per_second']:,.1f}",
            f"{1e3 * run['round_seconds']:,.1f}",
            *[f"{run['seconds'][part] / whole:.1%}" for part in parts],
            *rates,
        )
    return table


def broken_claims(runs: Runs) -> list[str]:
    """What does not hold of: slots are busy while episodes wait, no position of a prompt is computed twice, and the
    sampler is a small share of a round.

    Different prompts may have a beginning in common that is too short for a forward of its own: those positions are let
    pass. Within a group, and from turn to turn, none is.
    """
    broken = []
    for name, run in runs.items():
        waiting = run.get("occupancy_waiting", 1.0)
        if run.get("job") == "ragged" and waiting < OCCUPANCY:
            broken.append(f"{name}: {waiting:.1%} of the slots are busy while episodes wait, not {OCCUPANCY:.0%}")
        if run.get("job") == "turns" and "computed" in run:
            spared = WORTH_A_FORWARD * (run["prompts"] - 1)
            if run["computed"] > run["needed"] + spared:
                broken.append(
                    f"{name}: {run['computed']:,.0f} positions of prompts computed, {run['needed']:,.0f} needed"
                )
        if run.get("columns", 0) >= LARGE:
            share = run["seconds"]["sampler"] / sum(run["seconds"].values())
            if share > SAMPLER:
                broken.append(f"{name}: the sampler takes {share:.1%} of a round, over {SAMPLER:.0%}")
    return broken
