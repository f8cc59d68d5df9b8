"""A run as it is watched: a live panel in a terminal, one line per step in a log file, JSON lines for programs.

Text of models and tasks is hostile here too: control characters are shown as escapes, and markup is never interpreted.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from renma.training.progress_text import (
    comparison_table,
    episode,
    evaluation_line,
    facts_table,
    metric,
    sparkline,
    step_line,
    step_numbers,
)
from renma.viewer.text import duration, printable

Mode = Literal["auto", "plain", "quiet", "json"]
TRAIN = "train"
SHOWN_SAMPLES = 3
RECENT_STEPS = 20  # the time still to go is judged from these


class Progress:
    """Shows a run. Use it as a context manager, or call `close`: a live panel must give the terminal back.

    mode: `auto` is a live panel in a terminal and `plain` elsewhere; `plain` a line per step; `quiet` nothing but the
    report's path at the end; `json` one object per event, with its kind under "event".
    """

    def __init__(
        self, mode: Mode = "auto", *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"progress mode {mode!r}: use one of {', '.join(get_args(Mode))}")
        self._console = console or Console(highlight=False)
        self._mode: str = mode
        if mode == "auto":
            self._mode = "live" if self._console.is_terminal else "plain"
        self._clock = clock
        self._began = clock()
        self._name = ""
        self._live: Live | None = None
        self._train = _Phase(TRAIN, 0)
        self._phase: _Phase | None = None
        self._last: Mapping[str, Any] = {}
        self._success: list[float] = []
        self._step_ends: deque[float] = deque(maxlen=RECENT_STEPS + 1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what a run tells ----------------------------------------------------------------------------------------------

    def start(self, recipe_name: str, facts: Sequence[tuple[str, str]]) -> None:
        """The run's name, and the numbers that follow from its recipe."""
        self._name, self._began = recipe_name, self._clock()
        if self._mode == "json":
            self._json("start", {"name": recipe_name, "facts": dict(facts)})
        elif self._mode != "quiet":
            self._console.print(facts_table(recipe_name, facts))
        if self._mode == "live":
            self._live = Live(console=self._console, get_renderable=self._panel, refresh_per_second=4, transient=True)
            self._live.start()

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """A stretch of work begins: `train` counts steps, any other name counts `advance` calls.

        A phase inside training (an evaluation) ends with `evaluation`, and training goes on.
        """
        phase = _Phase(name, total, done)
        if name == TRAIN:
            self._train, self._phase = phase, phase
            self._pace_from_now()
        else:
            self._phase = phase
        if self._mode == "json":
            self._json("phase", {"name": name, "total": total, "done": done})
        elif self._mode == "plain" and name != TRAIN:
            self._line(f"{name}: {total} to do")

    def advance(self, success: bool | None = None, count: int = 1) -> None:
        """An episode ended (or another unit of the phase is done). `success` makes a running share, where known."""
        if self._phase is not None:
            self._phase.advance(success, count)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """A training step is done; `metrics` are its line of metrics.jsonl."""
        step = int(metrics.get("step", self._train.done + 1))
        self._train.done = step
        self._train.start_step()
        self._last = metrics
        self._step_ends.append(self._clock())
        success = metric(metrics, "success")
        if success is not None:
            self._success.append(success)
        if self._mode == "json":
            self._json("step", metrics)
        elif self._mode == "plain":
            self._line(step_line(metrics, self._train.total, self._time_left()))

    def evaluation(self, set_name: str, result: Mapping[str, Any]) -> None:
        """A set was measured: `success`, `low`, `high`, `n`. Ends the evaluation's phase."""
        self._phase = self._train if self._train.total else None
        self._pace_from_now()  # the pause is no step's time
        if self._mode == "json":
            self._json("evaluation", {"set": set_name, **result})
        elif self._mode != "quiet":
            self._line(evaluation_line(set_name, result))

    def note(self, text: str) -> None:
        """Something worth a line: a warning, a checkpoint, a retry."""
        if self._mode == "json":
            self._json("note", {"text": text})
        elif self._mode != "quiet":
            self._line(printable(text))

    def finish(
        self,
        table_rows: Mapping[str, Mapping[str, Mapping[str, Any]]],
        samples: Sequence[Mapping[str, Any]],
        report_path: Path | str,
    ) -> None:
        """The end. `table_rows`: summary.json's sets, {name: {before, cold_start, after}}; `samples`: its episodes."""
        self.close()
        if self._mode == "json":
            self._json("finish", {"sets": table_rows, "samples": samples, "report": str(report_path)})
            return
        if self._mode != "quiet":
            if table_rows:
                self._console.print(comparison_table(table_rows))
            for number, sample in enumerate(samples[:SHOWN_SAMPLES], start=1):
                self._console.print(episode(sample, number), soft_wrap=self._mode == "plain")
            self._line(f"finished in {duration(self._clock() - self._began)}")
        self._console.print(
            Text(f"report: {report_path}", style="bold", no_wrap=True, overflow="ignore"), soft_wrap=True
        )

    def close(self) -> None:
        """Give the terminal back. Safe to call twice, and needed when a run ends by an error."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    # -- how it is shown -----------------------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _json(self, event: str, fields: Mapping[str, Any]) -> None:
        record = {**_finite(fields), "event": event, "elapsed": round(self._clock() - self._began, 3)}
        self._console.file.write(json.dumps(record, ensure_ascii=True, default=str) + "\n")
        self._console.file.flush()

    def _pace_from_now(self) -> None:
        self._step_ends.clear()
        self._step_ends.append(self._clock())

    def _time_left(self) -> float | None:
        """Seconds to the last training step at the pace of the recent ones; None before there is a pace."""
        if len(self._step_ends) < 2 or not self._train.total:
            return None
        pace = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        return pace * max(0, self._train.total - self._train.done)

    def _panel(self) -> RenderableType:
        rows: list[RenderableType] = []
        phase = self._phase
        if phase is not None and phase is not self._train:
            rows.append(_bar(phase.name, phase.done, phase.total, phase.told()))
        if self._train.total:
            left = self._time_left()
            ending = f"{duration(left)} left" if left is not None else self._train.told()
            rows.append(_bar("step", self._train.done, self._train.total, ending))
            if phase is self._train and self._train.episodes:
                rows.append(Text(f"sampling: {self._train.told()}", style="dim"))
        if self._last:
            rows.append(_numbers(step_numbers(self._last)))
        if len(self._success) > 1:
            rows.append(Text.assemble(("success  ", "dim"), (sparkline(self._success, 60), "green")))
        if not rows:
            rows.append(Text("getting ready …", style="dim"))
        title = Text(f" {printable(self._name)} · {duration(self._clock() - self._began)} ")
        return Panel(Group(*rows), title=title, title_align="left", border_style="blue", padding=(0, 1))


class _Phase:
    """How far a stretch of work is, and how its episodes went."""

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        self.name, self.total, self.done = printable(name), total, done
        self.start_step()

    def start_step(self) -> None:
        self.episodes = self.judged = self.solved = 0

    def advance(self, success: bool | None, count: int) -> None:
        self.episodes += count
        if success is not None:
            self.judged += count
            self.solved += count * bool(success)
        if self.name != TRAIN:
            self.done = min(self.total, self.done + count)

    def told(self) -> str:
        if self.judged:
            return f"{self.solved} of {self.judged} solved"
        return f"{self.episodes} done" if self.episodes else ""


def _bar(name: str, done: int, total: int, ending: str) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(1, total), completed=done, width=30, complete_style="blue", finished_style="green")
    row.add_row(Text(name), bar, Text(f"{done}/{total}", style="bold"), Text(ending, style="dim"))
    return row


def _numbers(pairs: Sequence[tuple[str, str]]) -> Text:
    line = Text()
    for label, value in pairs:
        line.append(f"{label} ", style="dim").append(value, style="bold").append("   ")
    line.rstrip()
    return line


def _finite(value: Any) -> Any:
    """JSON has no nan and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
