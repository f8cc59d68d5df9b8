"""What comes before the loop: the policy is measured, gets its cold start, and a reward model is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from renma.learning.learner import Learner
from renma.models.policy import Policy
from renma.recipe import LearnerSection, Recipe
from renma.rewards.learned import learned, prepare, ready
from renma.training.cold_start import demonstration_rows, demonstrations, learn_demonstrations, steps_of
from renma.training.progress import Progress
from renma.training.records import Records
from renma.training.reward_stage import REWARD_MODEL, RewardStage, preference_source
from renma.training.setup import Parts


def make_learner(
    recipe: Recipe, policy: Policy, section: LearnerSection, steps: int, temperature: float | None = None
) -> Learner:
    """A learner of the policy over `steps` batches; temperature None: what the recipe samples at."""
    return Learner(
        policy.model,
        section,
        output_ids=policy.output_ids,
        temperature=recipe.sampling.temperature if temperature is None else temperature,
        compute_dtype=policy.compute_dtype,
        total_steps=steps,
    )


@dataclass(slots=True)
class Stages:
    """The stages of a run before its loop. `run` with fresh False only takes up what they left: a resumed run."""

    parts: Parts
    records: Records
    progress: Progress

    async def run(self, *, fresh: bool) -> None:
        parts, recipe = self.parts, self.parts.recipe
        if fresh:
            await parts.engine.load_weights(0)
            # A model that judges is not there yet; success does not hang on it.
            whole = parts.evaluator
            parts.evaluator = replace(whole, rewards=ready(whole.rewards))
            await self.records.evaluate(0, "before")
            await self._cold_start()
            if recipe.reward_model is not None:
                await self._reward_model()
            parts.evaluator = whole
        if learned(parts.runner.rewards):
            stage = self.records.folder.path / REWARD_MODEL
            prepare(
                parts.runner.rewards,
                parts.policy,
                stage=stage if recipe.reward_model is not None else None,
                together=not recipe.rollout.deterministic,
                max_positions=recipe.learner.max_positions,
            )
        if recipe.preferences is not None:
            source = preference_source(parts, recipe.preferences, "preferences")
            parts.preferences = await source.pairs()

    async def _cold_start(self) -> None:
        parts, section = self.parts, self.parts.recipe.cold_start
        if section is None or not section.demonstrations:
            return
        groups = await demonstrations(parts)
        self.records.store.append(0, groups, None, phase="demonstrations")
        rows = demonstration_rows(groups)
        total = steps_of(parts.recipe, len(rows))
        learner = make_learner(parts.recipe, parts.policy, section.learner, total, temperature=1.0)
        self.progress.phase("cold start", total)
        await learn_demonstrations(parts.recipe, learner, rows, self._logged("cold_start"))
        await parts.engine.load_weights(0)
        await self.records.evaluate(0, "cold_start")

    async def _reward_model(self) -> None:
        parts, section = self.parts, self.parts.recipe.reward_model
        assert section is not None
        stage = RewardStage(parts, section)
        self.progress.phase("preferences", 0)
        self.records.store.append(0, await stage.gather(), None, phase="preferences")
        self.progress.phase("reward model", stage.steps)
        numbers = await stage.learn(self._logged("reward_model"))
        stage.save(self.records.folder.path)
        await parts.engine.load_weights(0)
        self.records.metrics(0, "reward_model", numbers)
        told = ", ".join(f"{name} {value:.3f}" for name, value in numbers.items() if name.endswith("accuracy"))
        self.progress.note(f"reward model: {told or numbers}")

    def _logged(self, phase: str) -> Callable[[int, dict[str, float]], None]:
        def done(step: int, stats: dict[str, float]) -> None:
            numbers = {f"learner/{name}": value for name, value in stats.items()}
            self.records.metrics(0, phase, {f"{phase}_step": float(step), **numbers})
            self.progress.advance(None)

        return done
