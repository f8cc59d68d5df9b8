"""Numbers and events of a run: `metrics.jsonl` and `events.jsonl`, and the trackers a recipe names.

metrics.jsonl has one JSON object a line, `{"step": 3, "phase": "train", "time": 1764.2, "loss": 0.31, …}`; a number
that JSON has no form for (NaN, an infinity) is null. A line is written in one piece and flushed, so a killed run loses
at most the line it was writing, which the next opening removes.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from renma.errors import DataError, RecipeError, RunError
from renma.registry import nearest

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"


class Tracker(Protocol):
    """Where numbers are shown besides the run folder."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in the run's `tensorboard` folder; `tensorboard --logdir runs` shows them.

    resume_step: events of later steps, written before the run was killed, are hidden.
    """

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RecipeError(
                "trackers: tensorboard is not installed; pip install tensorboard, or trackers=[]"
            ) from error
        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge, flush_secs=20)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


TRACKERS: dict[str, Callable[[Path, int | None], Tracker]] = {"tensorboard": TensorBoardTracker}


class MetricsLog:
    """Appends to a run's metrics and events. Use as a context manager or call `close`.

    resume_step: the step of the checkpoint the run goes on from. Lines of later steps are removed (the run makes them
    again), and an event says so. Raises RunError when the folder cannot be written.
    """

    def __init__(self, run_dir: Path, trackers: Sequence[str] = (), *, resume_step: int | None = None) -> None:
        self._folder = run_dir
        try:
            dropped = _mend(run_dir / METRICS, resume_step)
            _mend(run_dir / EVENTS, None)
            # Unbuffered: what a full disk refused is not tried again when the file is closed.
            self._metrics = open(run_dir / METRICS, "ab", buffering=0)  # noqa: SIM115
            self._events = open(run_dir / EVENTS, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise RunError(
                f"cannot write metrics in {run_dir}: {error.strerror}; check owner and free space"
            ) from error
        self._trackers = []
        for name in trackers:
            if name not in TRACKERS:
                raise RecipeError(f"trackers: unknown tracker {name!r}; {nearest(name, list(TRACKERS))}")
            self._trackers.append(TRACKERS[name](run_dir, resume_step))
        if resume_step is not None:
            self.event("resumed", step=resume_step, metric_lines_dropped=dropped)

    def log(self, step: int, metrics: Mapping[str, float], phase: str = "train") -> None:
        """One line. Metric names in the trackers are `phase/name`."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self._write(self._metrics, {"step": step, "phase": phase, "time": round(time.time(), 3)} | numbers)
        for tracker in self._trackers:
            with self._disk():
                tracker.log(step, {f"{phase}/{name}": value for name, value in numbers.items()})

    def event(self, kind: str, **data: Any) -> None:
        """One line of events.jsonl: `{"time": …, "event": kind, **data}`."""
        self._write(self._events, {"time": round(time.time(), 3), "event": kind} | data)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()
        for tracker in self._trackers:
            with self._disk():
                tracker.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _write(self, file: FileIO, line: dict[str, Any]) -> None:
        # A value of a type JSON does not know is shown as text: an event must never end a run.
        rest = (json.dumps(_finite(line), allow_nan=False, default=str) + "\n").encode()
        with self._disk():
            while rest:
                rest = rest[file.write(rest) :]

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"metrics could not be written in {self._folder}: {error.strerror or error}; make room there and "
                f"`renma resume`"
            ) from error


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, oldest first; [] when there are none. A last line still being written is left out.

    Raises DataError for a line that is not JSON.
    """
    return _read(run_dir / METRICS)


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of events.jsonl, likewise."""
    return _read(run_dir / EVENTS)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON ({error}); remove the line") from error
    return lines


def _mend(path: Path, last_step: int | None) -> int:
    """Remove a half-written last line and, when last_step is given, the lines of later steps, in one rename.

    Gives how many whole lines went.
    """
    if not path.exists():
        return 0
    whole = path.read_bytes()
    lines = whole[: whole.rfind(b"\n") + 1].splitlines(keepends=True)
    kept = lines if last_step is None else [line for line in lines if json.loads(line)["step"] <= last_step]
    content = b"".join(kept)
    if content != whole:
        aside = path.with_name(f".{path.name}.tmp")
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    return len(lines) - len(kept)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
