"""A training run from its first check to its report, and its resumption."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from renma.evaluation.evaluate import EvaluationResult
from renma.event_loop import run_to_end
from renma.recipe import Recipe
from renma.recipe_checks import check_recipe, derived_facts
from renma.recipe_load import dump_recipe, load_recipe
from renma.rollout.store import TrajectoryStore
from renma.training.algorithms import resolve
from renma.training.checkpoints import latest_checkpoint
from renma.training.collapse import CollapseWatch
from renma.training.judges import make_judges
from renma.training.loop import Loop
from renma.training.metrics import MetricsLog, read_metrics
from renma.training.profile import PROFILE, StepProfiler
from renma.training.progress import Progress
from renma.training.records import Records
from renma.training.rng import seed_all
from renma.training.run_folder import RunFolder, next_name, write_whole
from renma.training.setup import Parts, assemble
from renma.training.stages import Stages, make_learner
from renma.training.state import POLICY, Progression, read_progression, restore_states
from renma.types import Group
from renma.viewer.report import write_report

SAMPLES = 3


class Trainer:
    """Runs a recipe: `renma.Trainer(recipe).fit()`.

    recipe: a Recipe, a mapping, or the path of a YAML file. output: where run folders are made.
    resume: the folder of a run to go on with; its own resolved recipe is used. profile: how many steps to profile
    (training/profile.py), after the first, which warms up.
    """

    def __init__(
        self,
        recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
        *,
        output: str | Path = "runs",
        resume: str | Path | None = None,
        overrides: Sequence[str] = (),
        progress: str = "auto",
        profile: int = 0,
    ) -> None:
        if (recipe is None) == (resume is None):
            raise ValueError("give a recipe, or the folder of a run to resume")
        self._resumed = resume is not None
        self.folder: RunFolder | None = None
        if resume is not None:
            self.folder = RunFolder.open(Path(resume).resolve())
            self.recipe = load_recipe(self.folder.recipe, overrides)
        else:
            self.recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)  # type: ignore[arg-type]
        check_recipe(self.recipe)
        self._output, self._profile = Path(output), profile
        self._progress = Progress(progress)  # type: ignore[arg-type]

    def fit(self) -> Path:
        """Train to the recipe's last step; returns the run's folder.

        An interrupt (Ctrl-C, SIGTERM) saves a checkpoint, then is raised again; `Trainer(resume=folder).fit()` goes on.
        """
        seed_all(self.recipe.seed)
        with self._opened() as folder:
            self.folder = folder
            found = latest_checkpoint(folder) if self._resumed else None
            checkpoint = found[1] if found else None
            # Adapters are restored onto the recipe's own model with the learner; a checkpoint's policy has them merged.
            whole = self.recipe.model.lora is None
            try:
                parts = assemble(self.recipe, policy_folder=checkpoint / POLICY if checkpoint and whole else None)
            except BaseException:
                if not self._resumed:
                    shutil.rmtree(folder.path)  # made a moment ago; nothing has been written yet
                raise
            write_whole(folder.recipe, dump_recipe(self.recipe))  # on a resume: with its overrides
            progression = read_progression(checkpoint) if checkpoint else Progression()
            records = self._records(folder, parts, progression, fresh=checkpoint is None)
            try:
                with self._progress:
                    run_interruptibly(parts.closing(self._run(parts, records, checkpoint, progression)))
            finally:
                records.close()
        return folder.path

    def _opened(self) -> RunFolder:
        """The run's folder, writable and locked."""
        if self.folder is not None:
            return RunFolder.create(self.folder.path.parent, self.folder.path.name, resume=True)
        name = next_name(self._output, self.recipe.name)
        return RunFolder.create(self._output, name)

    def _records(self, folder: RunFolder, parts: Parts, progression: Progression, *, fresh: bool) -> Records:
        """Logs that hold what led to `progression` and nothing later (`fresh`: nothing at all)."""
        path = folder.path
        kept = (-1 if fresh else progression.version) if self._resumed else None
        log = MetricsLog(path, self.recipe.trackers, resume_step=kept)
        store = TrajectoryStore(folder.trajectories)
        if kept is not None:
            store.forget_after(kept)
        facts = [("policy", parts.policy.description), *derived_facts(self.recipe), ("run folder", str(path))]
        self._progress.start(self.recipe.name, facts)
        watch = CollapseWatch.replay(read_metrics(path) if kept is not None else [])
        return Records(parts, folder, log, store, self._progress, progression.seconds, watch=watch)

    async def _run(self, parts: Parts, records: Records, checkpoint: Path | None, progression: Progression) -> None:
        recipe = self.recipe
        await Stages(parts, records, self._progress).run(fresh=checkpoint is None)
        learner = make_learner(recipe, parts.policy, recipe.learner, recipe.training.steps)
        algorithm = resolve(recipe.algorithm)
        assert self.folder is not None
        judges = make_judges(recipe, algorithm, parts.policy, learner, self.folder.path)
        position = progression.position if checkpoint else None
        loop = Loop(parts, learner, algorithm, records, progression.version, position, judges)
        if self._profile:
            first = min(loop.version + 1, recipe.training.steps - 1)
            loop.profiled = StepProfiler(self.folder.path / PROFILE, first, self._profile, self._progress.note)
        if checkpoint is None:
            records.checkpoint(loop)
        else:
            restore_states(checkpoint, loop.states)
            records.saved, records.evaluated = progression.version, progression.evaluated
            await parts.engine.load_weights(loop.version)
            await records.evaluate_when_due(loop.version)
        self._progress.phase("train", recipe.training.steps, done=loop.version)
        try:
            await loop.run()
        except (asyncio.CancelledError, KeyboardInterrupt):
            records.checkpoint(loop)
            raise
        results = await records.evaluate(loop.version, "after")
        self._finish(records, results)

    def _finish(self, records: Records, results: Sequence[EvaluationResult]) -> None:
        summary = records.summary()
        summary["samples"] = [sample_episode(g) for r in results for g in r.groups[:SAMPLES]][:SAMPLES]
        summary["seconds"] = records.seconds
        summary["status"] = "done"
        records.write_summary(summary)
        records.store.flush()
        assert self.folder is not None
        report = write_report(self.folder.path)
        self._progress.finish(summary.get("sets", {}), summary["samples"], report)


def sample_episode(group: Group) -> dict[str, Any]:
    """An episode as text, for summary.json and the report."""
    trajectory = group.trajectories[0]
    return {
        "task": trajectory.task.prompt,
        "answer": str(trajectory.task.answer),
        "return": trajectory.ret,
        "success": trajectory.solved,
        "stop_reason": trajectory.stop_reason,
        "steps": [
            {
                "action": step.action.raw,
                "observation": "\n".join(m.text for m in step.observation.messages),
                "reward": sum(step.reward.values()),
            }
            for step in trajectory.steps
        ],
    }


def run_interruptibly(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run, with SIGTERM treated like Ctrl-C: the main task is cancelled and can save.

    Where a loop already runs in this thread (a notebook), the run gets a thread of its own (`run_to_end`).
    """

    async def guarded() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        in_main = threading.current_thread() is threading.main_thread()
        if in_main:  # only the main thread receives signals
            loop.add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            await main
        finally:
            if in_main:
                loop.remove_signal_handler(signal.SIGTERM)

    try:
        run_to_end(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
