"""`--profile`: a few steps of a run under torch's profiler, each as a trace to open and a table of its phases.

    RUN/profile/step-3.json.gz   open it at https://ui.perfetto.dev or in chrome://tracing
    RUN/profile/step-3.txt       seconds and share of the step by phase

In the trace the loop's thread shows Renma's spans with torch's operators inside them; "beside the loop" shows what
overlaps it: episodes, calls of environments, rewards, and the thread that writes Parquet.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from renma.errors import RunError
from renma.profiling import Recording, Span, recording
from renma.training.run_folder import write_whole

PROFILE = "profile"  # the folder in the run's
MODEL = {
    "prefill": "sampling: prompts",
    "decode": "sampling: one token for each slot",
    "sampler": "sampling: draw and log-probability",
    "forward": "learning: forward",
    "loss": "learning: loss",
    "backward": "learning: backward",
    "optimiser": "learning: optimiser",
}
REST = {
    "render": "rendering and tokenising",
    "parse": "parsing",
    "engine": "engine: admission and slots",
    "rollout": "episodes, environments, event loop, waiting",
    "credit": "credit",
    "rows": "rows",
    "packing": "packing",
    "learner": "learner: bookkeeping",
    "sync": "weights to the engine",
    "metrics": "metrics and progress",
    "store": "store",
    "step": "the loop itself",
}
_EVENTS = '"traceEvents": ['
_BASE = re.compile(r'"baseTimeNanoseconds":\s*(\d+)')


class StepProfiler:
    """What `Loop.profiled` may be: profiles steps `first` to `first + steps - 1` (versions, counted from 0).

    A step that is interrupted or fails leaves nothing. note: told where each trace is. Raises RunError when the disk
    takes no more.
    """

    def __init__(self, folder: Path, first: int, steps: int, note: Callable[[str], None]) -> None:
        self.folder, self._wanted, self._note = folder, range(first, first + steps), note

    @contextmanager
    def __call__(self, version: int) -> Iterator[None]:
        if version not in self._wanted:
            yield
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes into the progress view
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=activities) as profiler, recording(record_function) as found:
            clock = time.time_ns() - time.perf_counter_ns()
            yield
        name = f"step-{version + 1}"  # as in metrics.jsonl: the updates that are done after it
        try:
            self.folder.mkdir(exist_ok=True)
            write_trace(profiler, found, clock, self.folder / f"{name}.json.gz")
            write_whole(self.folder / f"{name}.txt", phase_table(found, f"step {version + 1}"))
        except OSError as error:
            raise RunError(
                f"the profile of step {version + 1} could not be written in {self.folder}: {error.strerror or error}; "
                "make room there, or `renma resume` without --profile"
            ) from error
        self._note(
            f"profile of step {version + 1}: {rest_share(found):.1%} of it is not model compute; table and trace: "
            f"{self.folder / name}.txt, .json.gz"
        )


def write_trace(profiler: profile, found: Recording, clock: int, path: Path) -> None:
    """torch's trace with Renma's overlapping spans added. clock: what to add to a span's times for Unix nanoseconds."""
    aside = path.with_name(f".{path.name}.tmp")
    plain = path.with_name(f".{path.name}.json")
    try:
        profiler.export_chrome_trace(str(plain))
        head, _, tail = plain.read_text(encoding="utf-8").partition(_EVENTS)
        base = _BASE.search(head)
        if base is None or not tail:
            raise RunError("torch's profiler wrote a trace of an unknown form; profile with the torch that Renma names")
        ours = "".join(json.dumps(event) + ",\n" for event in beside_events(found, clock - int(base[1])))
        with gzip.open(aside, "wt", encoding="utf-8", compresslevel=3) as file:
            file.write(head + _EVENTS + "\n" + ours)
            file.write(tail)
        aside.replace(path)
    finally:
        plain.unlink(missing_ok=True)
        aside.unlink(missing_ok=True)


def beside_events(found: Recording, clock: int) -> list[dict[str, Any]]:
    """Trace events of what overlaps the loop, each kind on as many lanes as overlap. clock: see `write_trace`."""
    pid = "Renma: beside the loop"
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": pid}}]
    for name, spans in _beside(found).items():
        for lane, span in lanes(spans):
            place = {"pid": pid, "tid": f"{name} {lane + 1}"}
            times = {"ts": (span.start + clock) / 1e3, "dur": (span.end - span.start) / 1e3}
            events.append({"ph": "X", "cat": "renma", "name": name, **place, **times})
    return events


def lanes(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """Each span with the first lane that is free when it starts, in the order of starts."""
    free: list[int] = []  # when each lane's last span ends
    placed = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        lane = next((number for number, end in enumerate(free) if end <= span.start), len(free))
        free[lane:] = [span.end, *free[lane + 1 :]]
        placed.append((lane, span))
    return placed


def _beside(found: Recording) -> dict[str, list[Span]]:
    kinds: dict[str, list[Span]] = {}
    for span in found.spans:
        if span.depth < 0 or span.thread != found.thread:
            kinds.setdefault(span.name, []).append(span)
    return kinds


def rest_share(found: Recording) -> float:
    """The share of the recorded step that is not model compute."""
    return share_of_rest(found.own_seconds())


def share_of_rest(own: Mapping[str, float]) -> float:
    """As `rest_share`, from own seconds by name."""
    total = sum(own.values())
    return sum(seconds for name, seconds in own.items() if name not in MODEL) / max(total, 1e-12)


def phase_table(found: Recording, title: str) -> str:
    """Own seconds, share of the step and calls, by phase; then what ran beside the loop."""
    own, counts = found.own_seconds(), found.counts()
    total = max(sum(own.values()), 1e-12)
    width = 46

    def line(label: str, seconds: float, calls: str = "") -> str:
        return f"  {label:<{width}}{seconds:>10.4f} s{seconds / total:>8.1%}{calls:>9}"

    def part(name: str, names: Mapping[str, str]) -> list[str]:
        inside = sum(own.get(key, 0.0) for key in names)
        rows = [line(label, own[key], f"{counts[key]:,}") for key, label in names.items() if key in own]
        return [f"{name:<{width + 2}}{inside:>10.4f} s{inside / total:>8.1%}", *rows]

    others = {name: name for name in own if name not in MODEL and name not in REST}
    beside = found.beside_seconds()
    text = [f"{title}: {total:.3f} s", *part("model compute", MODEL), *part("the rest", REST | others)]
    if beside:
        text.append("beside the loop (summed; they overlap it and each other)")
        text += [f"  {name:<{width}}{seconds:>10.4f} s{counts[name]:>17,}" for name, seconds in sorted(beside.items())]
    return "\n".join(text) + "\n"
