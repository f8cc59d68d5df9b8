"""Where the time of a round of decoding goes in Renma's engine, by how many sequences it decodes at once.

Rounds without a profile say how long one is and how long its sampler takes. A profile of a few more says how long
matrix products and attention take; it makes everything small slower, so what is left of an unprofiled round is divided
between other tensor operations and Python as it was in the profile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.sampling_jobs import Episode, Job
from benchmarks.sampling_renma import RenmaSampler, all_tokens, parts_of, prompts_of
from benchmarks.tiny_runs import Results
from renma.inference.local import engine as engine_module
from renma.training.setup import Parts

CONCURRENCY = (1, 8, 16, 32, 64, 128, 256)
PLAIN, PROFILED = 12, 6  # rounds timed, rounds profiled
SAMPLER = "renma sampler"
LARGE = ("products", "head", "attention")
PARTS = (*LARGE, "sampler", "other operations", "python")
ATTENTION = ("attention", "bmm", "softmax")  # of a name; decoding multiplies batches of matrices nowhere else


def measure(recipe: str, concurrency: Sequence[int], results: Results) -> None:
    parts = parts_of(recipe)
    peak: float | None = None
    prompts = prompts_of(parts, max(concurrency))
    limits = ("all",) if parts.policy.output_ids is None else ("all", "tasks")
    for limit in limits:
        for count in concurrency:
            name = f"shares/{recipe}/{limit}/{count}"
            if name in results.runs:
                continue
            peak = peak or matmul_peak(parts.policy.compute_dtype)
            found = round_at(parts, limit == "all", prompts[:count], PLAIN, PROFILED)
            results.add(name, {"recipe": recipe, "shares_of": limit, "concurrency": count, "peak": peak, **found})
            print(f"{recipe}, {limit} tokens, {count} at once: {found['tokens_per_second']:,.1f} tok/s", flush=True)


def round_at(parts: Parts, everything: bool, prompts: list[list[int]], plain: int, profiled: int) -> dict[str, Any]:
    """round_seconds, tokens_per_second; seconds of each of PARTS in a round; GFLOP/s of the products of MLPs and
    attention projections, and of the head, over the time they take."""
    policy = all_tokens(parts.policy) if everything else parts.policy
    count, length = len(prompts), plain + profiled + 3
    context = max(len(prompt) for prompt in prompts) + length + 1
    sampler = RenmaSampler(policy, count, context)
    watched = Rounds(sampler, plain, profiled)
    job = Job("shares", [Episode(prompt, [length], []) for prompt in prompts])
    with watched:
        sampler.run(job)
    sampler.close()
    columns = policy.model.config.get_text_config().vocab_size if policy.output_ids is None else len(policy.output_ids)
    costs = Costs(columns)
    costs.add(watched.events)
    costs.seconds["python"] = max(0.0, watched.profiled_seconds - sum(costs.seconds.values()))
    seconds = divided(watched.plain_seconds / plain, watched.sampler_seconds / plain, costs.seconds, profiled)
    return {
        "round_seconds": watched.plain_seconds / plain,
        "tokens_per_second": count * plain / watched.plain_seconds,
        "profiled_round_seconds": watched.profiled_seconds / profiled,
        "seconds": seconds,
        "products_gflops": costs.rate("products"),
        "head_gflops": costs.rate("head"),
        "threads": torch.get_num_threads(),
        "columns": columns,
    }


def divided(whole: float, sampler: float, profile: Mapping[str, float], rounds: int) -> dict[str, float]:
    """Seconds of each of PARTS in a round of `whole` seconds, `sampler` of them in the sampler, by a profile of
    `rounds` rounds."""
    seconds = {part: profile[part] / rounds for part in LARGE}
    seconds["sampler"] = sampler
    left = max(0.0, whole - sum(seconds.values()))
    small = {part: profile[part] for part in PARTS if part not in seconds}
    total = sum(small.values()) or 1.0
    return {part: seconds.get(part, left * small.get(part, 0.0) / total) for part in PARTS}


class Rounds:
    """Watches the engine's rounds: the first two warm up, the next are timed, the next profiled."""

    def __init__(self, sampler: RenmaSampler, plain: int, profiled: int) -> None:
        self.engine = sampler.engine
        self.first, self.plain, self.profiled = 2, plain, profiled
        self.plain_seconds = self.profiled_seconds = self.sampler_seconds = 0.0
        self.events: list[FunctionEvent] = []
        self._seen = 0
        self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    def __enter__(self) -> Rounds:
        self._round, self._draw = self.engine._round, engine_module.draw
        self.engine._round = self._timed  # type: ignore[method-assign]
        engine_module.draw = self._drawn
        return self

    def __exit__(self, *error: object) -> None:
        self.engine._round = self._round  # type: ignore[method-assign]
        engine_module.draw = self._draw

    def _timed(self) -> None:
        number = self._seen - self.first
        self._seen += 1
        if number == self.plain:
            self._profile.__enter__()
        began = time.perf_counter()
        self._round()
        seconds = time.perf_counter() - began
        if 0 <= number < self.plain:
            self.plain_seconds += seconds
        elif self.plain <= number < self.plain + self.profiled:
            self.profiled_seconds += seconds
            if number == self.plain + self.profiled - 1:
                self._profile.__exit__(None, None, None)
                self.events = list(self._profile.events() or [])

    def _drawn(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        with record_function(SAMPLER):
            drawn = self._draw(*arguments)
        if self.first < self._seen <= self.first + self.plain:
            self.sampler_seconds += time.perf_counter() - began
        return drawn


@dataclass(slots=True)
class Costs:
    """Sums events by what they are for. columns: logits a row, which tell the head's product from others."""

    columns: int
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    flops: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, events: Iterable[FunctionEvent]) -> None:
        for event in events:
            if event.cpu_parent is None:
                self._walk(event)

    def rate(self, part: str) -> float:
        """GFLOP/s."""
        return self.flops[part] / self.seconds[part] / 1e9 if self.seconds[part] else 0.0

    def _walk(self, event: FunctionEvent) -> None:
        shapes = [list(shape) for shape in event.input_shapes or [] if shape]
        flops = product_flops(event.name, shapes)
        if event.name == SAMPLER:
            part = "sampler"
        elif any(word in event.name for word in ATTENTION):
            part, flops = "attention", 0.0
        elif flops:
            part = "head" if any(self.columns in shape for shape in shapes) else "products"
        elif event.cpu_children:
            for child in event.cpu_children:
                self._walk(child)
            self.seconds["other operations"] += event.self_cpu_time_total * 1e-6
            return
        else:
            part = "other operations"
        self.seconds[part] += event.cpu_time_total * 1e-6
        self.flops[part] += flops


def product_flops(name: str, shapes: Sequence[Sequence[int]]) -> float:
    """Floating-point operations of a matrix product by its name and the shapes of its tensors; 0 for anything else."""
    kind = name.removeprefix("aten::").removeprefix("mkldnn::")
    if kind in ("addmm", "addmv", "baddbmm"):
        shapes = shapes[1:]
    elif kind not in ("mm", "mv", "bmm", "_linear_pointwise", "mkldnn_linear", "_mkl_linear"):
        return 0.0
    left, right = shapes[0], shapes[1]
    if "linear" in kind:  # x [.., k], weight [n, k]
        return 2.0 * math.prod(left) * right[0]
    return 2.0 * math.prod(left) * (right[-1] if len(right) > 1 else 1)


def matmul_peak(dtype: torch.dtype, size: int = 2048, seconds: float = 2.0) -> float:
    """GFLOP/s of the fastest of the products of two [size, size] matrices that fit into `seconds`."""
    left, right = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    best, until = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best / 1e9
