"""What a run folder holds, read for showing: whatever is there is taken, whatever is missing is noted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from renma.errors import RunError

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """One set measured once. `base`: before the cold start, where the run has one."""

    step: int
    success: float
    low: float | None
    high: float | None
    base: bool = False


@dataclass(slots=True)
class RunData:
    """train, cold_start: (step, metrics) in order of step. evaluations: by set, in order of time.

    sets: summary.json's `sets`: {name: {"before" | "cold_start" | "after": {"success", "low", "high", "n", ...}}}.
    warnings: (step, text) of the collapse watch. notes: what was missing or could not be read, one line each.
    """

    path: Path
    train: list[tuple[int, Metrics]] = field(default_factory=list)
    cold_start: list[tuple[int, Metrics]] = field(default_factory=list)
    evaluations: dict[str, list[EvaluationPoint]] = field(default_factory=dict)
    sets: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False
    seconds: float = 0.0
    recipe_text: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    warnings: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.recipe.get("name") or self.path.resolve().name)

    def setting(self, *keys: str) -> Any:
        """A leaf of the recipe, or None."""
        node: Any = self.recipe
        for key in keys:
            node = node.get(key) if isinstance(node, Mapping) else None
        return node

    def series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of a training metric; `learner/<name>` counts as the same metric."""
        found = []
        for step, metrics in self.train:
            value = metrics.get(name, metrics.get(f"learner/{name}"))
            if value is not None:
                found.append((float(step), value))
        return found


def read_run(run_dir: Path) -> RunData:
    """Raises RunError when there is no such folder; anything less becomes a note."""
    if not run_dir.is_dir():
        raise RunError(f"there is no run folder {str(run_dir)!r}; give the folder that `renma train` printed")
    run = RunData(run_dir)
    _read_recipe(run)
    _read_metrics(run)
    _read_summary(run)
    _read_warnings(run)
    return run


def _text(run: RunData, name: str, holds: str) -> str | None:
    try:
        return (run.path / name).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        run.notes.append(f"{name} is not there, so {holds} cannot be shown.")
    except OSError as error:
        run.notes.append(f"{name} cannot be read ({error.strerror}), so {holds} cannot be shown.")
    return None


def _read_recipe(run: RunData) -> None:
    text = _text(run, "recipe.yaml", "the recipe")
    if text is None:
        return
    run.recipe_text = text
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        tree = None
    if isinstance(tree, dict):
        run.recipe = tree
    else:
        run.notes.append("recipe.yaml is not a YAML mapping; its text is shown as it is.")


def _read_metrics(run: RunData) -> None:
    text = _text(run, "metrics.jsonl", "learning curves")
    if text is None:
        return
    unreadable = 0
    train: dict[int, Metrics] = {}
    base: list[tuple[str, int]] = []  # set and position of evaluations that came before any learning
    for line in text.splitlines():
        if not line.strip():
            continue
        record = _record(line)
        if record is None:
            unreadable += 1
            continue
        step, phase = int(record.get("step", 0)), record.get("phase", "train")
        metrics = {key: value for key, value in _numbers(record) if key not in ("step", "seconds")}
        run.seconds = max(run.seconds, _number(record.get("seconds")) or 0.0)
        for name, point in _evaluations(step, metrics):
            run.evaluations.setdefault(name, []).append(point)
            if not run.cold_start and not train:
                base.append((name, len(run.evaluations[name]) - 1))
        if phase == "cold_start":
            run.cold_start.append((step, metrics))
        elif phase == "train":
            train[step] = metrics  # a step done again after a resume replaces the first
    run.train = sorted(train.items())
    if run.cold_start:
        for name, index in base:
            point = run.evaluations[name][index]
            run.evaluations[name][index] = EvaluationPoint(point.step, point.success, point.low, point.high, base=True)
    if unreadable:
        run.notes.append(f"{unreadable} line(s) of metrics.jsonl could not be read (cut off when the run stopped?).")


def _read_warnings(run: RunData) -> None:
    """Collapse warnings of events.jsonl; a run without that file had none to tell."""
    if not (run.path / "events.jsonl").exists():
        return
    for line in (_text(run, "events.jsonl", "warnings") or "").splitlines():
        event = _record(line)
        if event is not None and event.get("event") == "collapse":
            run.warnings.append((int(event["step"]), str(event.get("text", ""))))


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or _number(record.get("step", 0)) is None:
        return None
    return record


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        finite = float(value)
    except OverflowError:
        return None
    return finite if math.isfinite(finite) else None


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        number = _number(value)
        if number is not None:
            yield key, number


def _evaluations(step: int, metrics: Metrics) -> Iterator[tuple[str, EvaluationPoint]]:
    """The sets measured in a record: its keys `evaluation/<set>/success`, with low and high where given."""
    for key, success in metrics.items():
        prefix, _, leaf = key.rpartition("/")
        if leaf == "success" and prefix.startswith("evaluation/"):
            point = EvaluationPoint(step, success, metrics.get(f"{prefix}/low"), metrics.get(f"{prefix}/high"))
            yield prefix.removeprefix("evaluation/"), point


def _read_summary(run: RunData) -> None:
    text = _text(run, "summary.json", "the comparison before and after, and sample episodes,")
    if text is None:
        return
    try:
        summary = json.loads(text)
    except ValueError:
        summary = None
    if not isinstance(summary, dict):
        run.notes.append("summary.json is not a JSON object, so the comparison before and after cannot be shown.")
        return
    run.seconds = max(run.seconds, _number(summary.get("seconds")) or 0.0)
    sets = summary.get("sets")
    for name, stages in (sets if isinstance(sets, dict) else {}).items():
        usable = {
            stage: entry
            for stage, entry in (stages if isinstance(stages, dict) else {}).items()
            if isinstance(entry, dict) and _number(entry.get("success")) is not None
        }
        if usable:
            run.sets[str(name)] = usable
    ended = bool(run.sets) and all("after" in stages for stages in run.sets.values())
    run.finished = summary["status"] == "done" if "status" in summary else ended
    samples = summary.get("samples")
    run.samples = [sample for sample in samples if isinstance(sample, dict)] if isinstance(samples, list) else []
