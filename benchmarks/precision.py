"""Number types of the sampler against the learner: how far apart they are, what each costs and takes.

    python -m benchmarks.precision --out precision.json                     # goes on where it stopped
    python -m benchmarks.precision --out precision.json --table
    python -m benchmarks.precision --recipes quickstart --quick             # a look: one run, few tokens
    python -m benchmarks.precision --recipes word-problems --set model.output_tokens=all
    python -m benchmarks.precision --kernels                                # 8-bit products of this CPU, one by one

For each recipe's policy (quickstart's after its cold start, word-problems' as it comes: Gemma-3-270M) and each number
type: the local engine samples actions of fixed length from prompts of the recipe's tasks, many at once, at temperature
1, and the learner's scorer says what it makes of the same tokens. `int8` is 8-bit weights over the float32 policy that
the learner keeps. Tokens a second are of decoding: prompts are cached from a pass before. Types take turns; medians
over the runs. Where bfloat16 would be emulated it is left out for a large model, unless `--dtypes` names it.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.step_time import cold_started
from benchmarks.tiny_runs import Results
from renma.inference import Sample, SamplingParams
from renma.inference.local import LocalEngine
from renma.inference.local.int8 import Fbgemm, Int8Weights, IntegerMatmul, quantised
from renma.learning.rows import Row
from renma.learning.scorer import Scorer
from renma.learning.statistics import Mismatch
from renma.models.devices import multiplies_bfloat16
from renma.models.policy import save_policy
from renma.recipe_load import load_recipe
from renma.recipes import find_recipe
from renma.training.setup import Parts, assemble
from renma.types import Message

KINDS = ("float32", "bfloat16", "int8")
LARGE = 50e6  # parameters from which emulated bfloat16 is not waited for
ROWS = (
    ("mean |Δ|, nats", "mismatch_mean", statistics.median, ".2g"),
    ("max |Δ|", "mismatch_max", max, ".2g"),
    ("effective sample size, of a token", "effective_sample_size", statistics.median, ".4f"),
    ("KL(sampler || learner), nats a token", "kl_behaviour", statistics.median, ".2g"),
    ("tokens/s, {} at once", "tokens_per_second_", statistics.median, ",.0f"),
    ("seconds to renew the weights", "sync_seconds", statistics.median, ".3f"),
    ("the learner's weights, MB", "megabytes", statistics.median, ",.1f"),
    ("the sampler's own beside them, MB", "extra_megabytes", statistics.median, ",.1f"),
)


def parts_of(name: str, arguments: argparse.Namespace, console: Console) -> Parts:
    """The recipe's parts in float32; a policy from scratch after its cold start, which `--policies` keeps."""
    recipe = load_recipe(find_recipe(name), ["model.dtype=float32", *arguments.set])
    if recipe.model.type != "scratch" or arguments.quick:
        return assemble(recipe)
    kept: Path = arguments.policies / f"{recipe.name}-{recipe.seed}"
    if kept.exists():
        return assemble(recipe, policy_folder=kept)
    parts = assemble(recipe)
    cold_started(name, parts, console)
    save_policy(parts.policy, kept)
    return parts


class Sampler:
    """One number type: an engine, and the learner's scorer over the model that the learner would have."""

    def __init__(self, parts: Parts, kind: str, slots: int) -> None:
        policy = parts.policy
        self.kind = kind
        self.model: Any = policy.model
        if kind == "bfloat16":
            self.model = copy.deepcopy(policy.model).to(torch.bfloat16)
        self.engine = LocalEngine(
            self.model,
            policy.tokenizer,
            output_ids=policy.output_ids,
            slots=slots,
            weights="int8" if kind == "int8" else "own",
        )
        self.scorer = Scorer(self.model, output_ids=policy.output_ids)

    def sample(self, prompts: Sequence[list[int]], length: int, first_seed: int) -> list[Sample]:
        async def all_of_them() -> list[Sample]:
            return await asyncio.gather(
                *(
                    self.engine.sample(prompt, SamplingParams(max_tokens=length, seed=first_seed + n), key=(n,))
                    for n, prompt in enumerate(prompts)
                )
            )

        return asyncio.run(all_of_them())

    def tokens_per_second(self, prompts: Sequence[list[int]], length: int, seed: int) -> float:
        self.sample(prompts, 1, seed)
        started = time.perf_counter()
        samples = self.sample(prompts, length, seed)
        return sum(len(sample.ids) for sample in samples) / (time.perf_counter() - started)

    def mismatch(self, prompts: Sequence[list[int]], length: int, seed: int) -> dict[str, float]:
        """The learner's metrics of the same names (learner/mismatch_mean …), over one batch."""
        rows = [
            row_of(prompt, sample, n)
            for n, (prompt, sample) in enumerate(zip(prompts, self.sample(prompts, length, seed), strict=True))
        ]
        mismatch = Mismatch()
        for row, learned in zip(rows, self.scorer.logprobs(rows), strict=True):
            mismatch.add(learned - row.logprobs[row.trained])
        return mismatch.result()

    def sync_seconds(self) -> float:
        started = time.perf_counter()
        asyncio.run(self.engine.load_weights(self.engine.version + 1))
        return time.perf_counter() - started

    def megabytes(self, parts: Parts) -> tuple[float, float]:
        """Of the learner's weights in its compute type, and of those that only the sampler has."""
        own = sum(p.nbytes for p in self.model.parameters()) / 1e6
        if self.kind != "int8":
            return own, 0.0
        return own, Int8Weights(self.model, output_ids=parts.policy.output_ids).nbytes / 1e6


def row_of(prompt: list[int], sample: Sample, number: int) -> Row:
    size, sampled = len(prompt) + len(sample.ids), len(sample.ids)
    trained = np.arange(size) >= len(prompt)
    logprobs = np.zeros(size, np.float32)
    logprobs[trained] = sample.logprobs
    whole = np.where(trained, 0, -1).astype(np.int32)
    assert trained.sum() == sampled
    ids = np.concatenate([prompt, sample.ids]).astype(np.int32)
    return Row(ids, trained, logprobs, np.zeros(size, np.float32), whole, whole, number)


def kinds_for(parts: Parts, arguments: argparse.Namespace, console: Console) -> list[str]:
    if arguments.dtypes:
        return list(arguments.dtypes)
    if multiplies_bfloat16(parts.policy.device):
        return list(KINDS)
    emulated = "this machine has no bfloat16 instructions: torch emulates them, many times slower than float32"
    if parts.policy.parameters < LARGE:
        console.print(f"{parts.recipe.name}: {emulated}; measured all the same, the model is small")
        return list(KINDS)
    console.print(f"{parts.recipe.name}: {emulated}; left out, --dtypes float32 bfloat16 int8 measures it all the same")
    return [kind for kind in KINDS if kind != "bfloat16"]


def measure(name: str, arguments: argparse.Namespace, results: Results, console: Console) -> None:
    parts = parts_of(name, arguments, console)
    name = " ".join([name, *arguments.set])
    kinds = kinds_for(parts, arguments, console)
    left = [
        (run, kind)
        for run in range(arguments.runs)
        for kind in kinds[run % len(kinds) :] + kinds[: run % len(kinds)]  # another begins each round
        if f"{name}/{kind}/{run}" not in results.runs
    ]
    most = max(arguments.concurrency)
    prompts = [
        [int(token) for token in parts.renderer.start([Message("user", parts.task_at(n).prompt)])] for n in range(most)
    ]
    samplers: dict[str, Sampler] = {}
    for run, kind in left:
        if kind not in samplers:
            samplers[kind] = Sampler(parts, kind, most)
        sampler = samplers[kind]
        length = min(arguments.tokens, sampler.engine.context - max(map(len, prompts)))
        found: dict[str, Any] = {"recipe": name, "kind": kind, "run": run, "parameters": parts.policy.parameters}
        found["sync_seconds"] = sampler.sync_seconds()
        found["megabytes"], found["extra_megabytes"] = sampler.megabytes(parts)
        found |= sampler.mismatch(prompts, length, 1000 * run)
        for together in arguments.concurrency:
            rate = sampler.tokens_per_second(prompts[:together], length, 1000 * run)
            found[f"tokens_per_second_{together}"] = rate
            console.print(f"{name}, {kind}, run {run}: {together} at once, {rate:,.1f} tokens/s")
        results.add(f"{name}/{kind}/{run}", found)


def show(results: Results, console: Console) -> None:
    for name in sorted({run["recipe"] for run in results.runs.values()}):
        runs = [run for run in results.runs.values() if run["recipe"] == name]
        kinds = [kind for kind in KINDS if any(run["kind"] == kind for run in runs)]
        table = Table(
            title=f"{name}: {runs[0]['parameters'] / 1e6:.1f} M parameters, {torch.get_num_threads()} threads"
        )
        table.add_column("medians of (runs)")
        for kind in kinds:
            table.add_column(f"{kind} ({sum(run['kind'] == kind for run in runs)})", justify="right")
        for label, key, how, form in ROWS:
            # The numbers of actions at once are the command line's.
            for found in sorted({k for run in runs for k in run if k.startswith(key)}, key=lambda k: (len(k), k)):
                cells = [[run[found] for run in runs if run["kind"] == kind and found in run] for kind in kinds]
                shown = [format(how(values), form) if values else "" for values in cells]
                table.add_row(label.format(found.removeprefix(key)), *shown)
        console.print(table)


# ---- kernels


def kernels(console: Console, sizes: Sequence[tuple[int, int]], rows: Sequence[int]) -> None:
    """Milliseconds of one product [n, K] by [N, K] as a layer would ask for it, activations rounded where they are."""
    table = Table(title=f"ms a product, the least of several; {torch.get_num_threads()} threads")
    ways = ("float32", "ours", "ours, no turn", "dynamic fbgemm", "dynamic onednn", "_weight_int8pack_mm", "_int_mm")
    for title in ("K x N", "rows", *ways):
        table.add_column(title, justify="right")
    for inputs, outputs in sizes:
        weight = torch.randn(outputs, inputs) * 0.02
        for count in rows:
            x = torch.randn(count, inputs)
            times = [least(way) for way in _ways(weight, x)]
            table.add_row(f"{inputs} x {outputs}", str(count), *(f"{1000 * seconds:.3f}" for seconds in times))
    console.print(table)


def _ways(weight: torch.Tensor, x: torch.Tensor) -> list[Callable[[], object]]:
    ours = _Head(weight)
    weights = Int8Weights(ours, kernel=Fbgemm())
    integers = Int8Weights(ours, kernel=IntegerMatmul())
    values, scale = quantised(weight, None, Fbgemm.levels)
    packed = Fbgemm().pack(values, scale)
    low = scale.to(torch.bfloat16)

    def unturned() -> torch.Tensor:
        size = x.abs().amax(1, keepdim=True).div_(Fbgemm.levels)
        return Fbgemm().product(x / size, packed).mul_(size)

    return [
        lambda: torch.nn.functional.linear(x, weight),
        lambda: (weights.forget(), weights.logits(x)),
        unturned,
        *(_dynamic(engine, values, scale, x) for engine in ("fbgemm", "onednn")),
        lambda: torch._weight_int8pack_mm(x.to(torch.bfloat16), values, low).float(),
        lambda: (integers.forget(), integers.logits(x)),
    ]


def _dynamic(engine: str, values: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> Callable[[], object]:
    packed = Fbgemm().pack(values, scale, engine)
    return lambda: torch.ops.quantized.linear_dynamic(x, packed, True)


class _Head(torch.nn.Module):
    """A matrix as the head of a model that has nothing else."""

    device = torch.device("cpu")

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.head.weight = torch.nn.Parameter(weight)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


@torch.no_grad()
def least(way: Callable[[], object], seconds: float = 0.2) -> float:
    """The least time of one call, over as many as fit into `seconds` (two at least)."""
    way()
    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:
        started = time.perf_counter()
        way()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["quickstart", "word-problems"])
    parser.add_argument("--dtypes", nargs="+", choices=KINDS, help="default: all, but for what would be emulated")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a leaf of the recipe")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="of one action")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 64], help="actions decoded at once")
    parser.add_argument("--policies", type=Path, default=Path("policies"), help="where cold-started policies are kept")
    parser.add_argument("--out", type=Path, default=Path("precision.json"))
    parser.add_argument("--quick", action="store_true", help="one run of few tokens, no cold start")
    parser.add_argument("--table", action="store_true", help="only show what is there")
    parser.add_argument("--kernels", action="store_true", help="time single products instead")
    arguments = parser.parse_args()
    console = Console()
    if arguments.kernels:
        sizes = ((640, 2048),) if arguments.quick else ((640, 256), (640, 2048), (2048, 640), (192, 512), (640, 32768))
        kernels(console, sizes, (1, 8, 64))
        return
    if arguments.quick:
        arguments.runs, arguments.tokens, arguments.concurrency = 1, 4, [1, 4]
    results = Results(arguments.out)
    if not arguments.table:
        for name in arguments.recipes:
            measure(name, arguments, results, console)
    show(results, console)


if __name__ == "__main__":
    main()
