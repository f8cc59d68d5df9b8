"""What a run leaves behind: metrics, trajectories, checkpoints, evaluations, and what the terminal shows."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from renma.evaluation.evaluate import EvaluationResult, evaluate
from renma.profiling import span
from renma.rollout.store import TrajectoryStore
from renma.training.batch import Batch
from renma.training.checkpoints import save_checkpoint
from renma.training.collapse import CollapseWatch
from renma.training.metrics import MetricsLog
from renma.training.run_folder import RunFolder, write_whole
from renma.training.setup import Parts
from renma.training.state import Progression, write_state
from renma.types import Group, Trajectory

if TYPE_CHECKING:
    from renma.training.loop import Loop
    from renma.training.progress import Progress

SUMMARY = "summary.json"
REJECTED = 0.5  # of the tokens: a correction that takes more away is worth a word


@dataclass(slots=True)
class Records:
    """Takes every result of a run out to its folder and to the progress view."""

    parts: Parts
    folder: RunFolder
    log: MetricsLog
    store: TrajectoryStore
    progress: Progress
    seconds_before: float = 0.0
    saved: int = -1
    evaluated: int = 0
    watch: CollapseWatch = field(default_factory=CollapseWatch)
    rejecting: bool = False
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, over all its processes."""
        return self.seconds_before + time.perf_counter() - self.started

    def episode_done(self, step: int, trajectory: Trajectory) -> None:
        self.progress.advance(trajectory.success)

    def learned(self, step: int, groups: Sequence[Group], batch: Batch, metrics: dict[str, float]) -> None:
        """One training step's results; `step` counts from 0, its metrics are logged as step + 1 updates done."""
        with span("store"):
            self.store.append(step, batch.groups, batch.credit.advantages, phase="train")
            kept = {id(group) for group in batch.groups}
            lost = [group for group in groups if id(group) not in kept]
            if lost:
                self.store.append(step, lost, None, phase="dropped")
        with span("metrics"):
            self.metrics(step + 1, "train", metrics)
            self.progress.step({"step": step + 1, **metrics})
            self._warn(step, metrics)

    def _warn(self, step: int, metrics: dict[str, float]) -> None:
        """Say what a glance at the numbers would not tell: a collapse, or a correction that takes the batch away."""
        rejected = metrics.get("learner/correction_reject_share", 0.0)
        if rejected > REJECTED and not self.rejecting:
            text = (
                f"step {step + 1}: the correction rejects {rejected:.0%} of the tokens, and the rest is all that is "
                "learned from: widen its bounds, or weigh instead (token_tis)"
            )
            self.log.event("rejected", step=step + 1, share=rejected, text=text)
            self.progress.note(text)
        self.rejecting = rejected > REJECTED
        warning = self.watch.feed(step + 1, metrics)
        if warning is not None:
            self.log.event("collapse", **warning.data)
            self.progress.note(warning.text)

    def metrics(self, step: int, phase: str, metrics: dict[str, float]) -> None:
        self.log.log(step, {"seconds": self.seconds, **metrics}, phase)

    async def step_done(self, loop: Loop) -> None:
        """After an update, with the new weights in the sampler: evaluate and save when it is time."""
        await self.evaluate_when_due(loop.version)
        due = loop.parts.recipe.training.checkpoint_every
        if loop.version == loop.parts.recipe.training.steps or (due and loop.version % due == 0):
            self.checkpoint(loop)

    async def evaluate_when_due(self, version: int) -> None:
        """The evaluation between steps, once: a resumed run makes up for one that was interrupted."""
        section, steps = self.parts.recipe.evaluation, self.parts.recipe.training.steps
        if section.every and version % section.every == 0 and self.evaluated < version < steps:
            await self.evaluate(version, "during", limit=section.limit)
            # What the evaluation left in the prefix cache must not change a later bit of the training run.
            await self.parts.engine.load_weights(version)
        self.evaluated = version

    async def evaluate(self, step: int, when: str, limit: int | None = None) -> list[EvaluationResult]:
        results = []
        for chosen in self.parts.evaluation:
            tasks = chosen.tasks[:limit] if limit else chosen.tasks
            k = self.parts.recipe.evaluation.k
            self.progress.phase(f"evaluate {chosen.name}", len(tasks) * k)
            result = await evaluate(
                self.parts.evaluator,
                tasks,
                name=chosen.name,
                k=k,
                done=lambda t: self.progress.advance(t.success),
            )
            results.append(result)
            self.store.append(step, result.groups, None, phase=f"evaluation/{chosen.name}/{when}")
            self.metrics(step, "evaluation", result.metrics())
            self.progress.evaluation(f"{chosen.name} {when}", result.summary())
            if when != "during":
                self.summarise(chosen.name, when, result)
        return results

    def summarise(self, name: str, when: str, result: EvaluationResult) -> None:
        """Keep an evaluation's numbers, and each task's outcome, in summary.json."""
        summary = self.summary()
        entry = {**result.summary(), "successes": list(result.successes)}
        summary.setdefault("sets", {}).setdefault(name, {})[when] = entry
        self.write_summary(summary)

    def summary(self) -> dict[str, Any]:
        path = self.folder.path / SUMMARY
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_whole(self.folder.path / SUMMARY, json.dumps(summary, ensure_ascii=False, indent=1))

    def checkpoint(self, loop: Loop) -> None:
        """Save the whole state; what was logged before it is on disk before it."""
        if loop.version == self.saved:
            return
        self.store.flush()
        progression = Progression(loop.version, loop.position, self.seconds, self.evaluated)

        def write(folder: Path) -> None:
            write_state(folder, self.parts.policy, loop.states, progression)

        save_checkpoint(self.folder, loop.version, write, keep=self.parts.recipe.training.keep_checkpoints)
        self.saved = loop.version

    def close(self) -> None:
        try:
            self.store.close()
        finally:
            self.log.close()
