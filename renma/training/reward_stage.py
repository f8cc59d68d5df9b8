"""The reward-model stage: preferences are gathered, a reward model learns them, is measured and kept.

With it a recipe is the classical pipeline of reinforcement learning from human feedback (Ouyang et al. 2022):
preferences, reward model, then any algorithm with `rewards: [{type: reward_model}]`. One step an episode is the bandit
view of it, and the same loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from renma.errors import RecipeError, RunError
from renma.learning.reward_learner import RewardLearner
from renma.learning.reward_model import RewardModel
from renma.models.policy import Policy, load_policy
from renma.parts import build, checked_options
from renma.preferences import PREFERENCES, SUPPLIED, Judgements, Preferences
from renma.preferences.base import split
from renma.recipe import Component, PretrainedModel, RewardModelSection
from renma.rewards.base import NamedReward, build_rewards
from renma.rewards.learned import STAGE, learned
from renma.seeding import seed_for
from renma.training.setup import Parts
from renma.types import Group

REWARD_MODEL = "reward_model"
"""The folder of the trained model in a run's folder."""


def check_reward_model(section: RewardModelSection | None, rewards: Sequence[NamedReward]) -> None:
    """Raise RecipeError for the first contradiction between the stage and the rewards that wait for it."""
    waiting = [reward for reward in learned(rewards) if reward.source == STAGE]
    if section is None:
        if waiting:
            raise RecipeError(
                f"rewards: a learned reward has source: {STAGE}, but the recipe has no reward_model section; add one, "
                "or give the folder of a trained reward model as source"
            )
        return
    place = "reward_model.preferences"
    checked = checked_options(PREFERENCES, section.preferences, place, set(SUPPLIED))
    judging = build_rewards(checked.get("rewards", ()), f"{place}.rewards") if "rewards" in checked else []
    if any(reward.source == STAGE for reward in learned(judging)):
        raise RecipeError(f"{place}.rewards: these judge what the reward model learns from; name verifiers here")
    wrong = next((reward for reward in waiting if reward.form != section.form), None)
    if wrong is not None:
        raise RecipeError(
            f"reward_model.form is {section.form!r}, but a reward asks for the {wrong.form} form; change one of them"
        )
    wanted = Preferences if section.form == "outcome" else Judgements
    method = "pairs" if section.form == "outcome" else "judged"
    if not hasattr(PREFERENCES[section.preferences.type], method):
        raise RecipeError(
            f"{place}: {section.preferences.type!r} gives nothing that the {section.form} form learns from (no method "
            f"{method}, see renma.preferences.{wanted.__name__})"
        )


def preference_source(parts: Parts, component: Component, place: str) -> Any:
    """The source that the component names, over the run's own parts. Raises RecipeError naming the place."""
    return build(
        PREFERENCES,
        component,
        place,
        runner=parts.runner,
        renderer=parts.renderer,
        tokenizer=parts.policy.tokenizer,
        task_at=parts.task_at,
        seed=seed_for(parts.recipe.seed, "preferences"),
    )


@dataclass(slots=True)
class RewardStage:
    """Trains the reward model of a run: `gather`, then `learn`, then `save`.

    The policy is sampled and copied as it is when `gather` and `learn` are called (after a cold start, say).
    """

    parts: Parts
    section: RewardModelSection
    training: list[Group] = field(default_factory=list)
    held_out: list[Group] = field(default_factory=list)
    model: RewardModel | None = None

    async def gather(self) -> list[Group]:
        """Gather what is learned from, and set a part aside. Returns all of it: pairs, or trajectories with labels.

        Raises RunError when there is none.
        """
        source = preference_source(self.parts, self.section.preferences, "reward_model.preferences")
        groups: list[Group] = await (source.pairs() if self.section.form == "outcome" else source.judged())
        if not groups:
            raise RunError(
                f"reward_model: the source {self.section.preferences.type!r} has nothing to learn from: in none of its "
                "groups do two attempts differ in what they wrote and in their return; take more groups or members"
            )
        self.training, self.held_out = split(groups, self.section.held_out, self._seed("split"))
        return groups

    @property
    def steps(self) -> int:
        """Optimiser steps that `learn` takes."""
        return self.section.epochs * -(-len(self.training) // self.section.batch)

    async def learn(self, done: Callable[[int, dict[str, float]], None]) -> dict[str, float]:
        """Train; `done(step, statistics)` after each optimiser step.

        Returns the statistics of the trained model on what it learned from (`train/…`) and on what was set aside
        (`held_out/…`), as RewardLearner.measure names them; and `centre`, what was taken from each score. Raises
        ModelError when `reward_model.model` has another tokenizer than the policy.
        """
        section = self.section
        self.model = RewardModel.start(self._origin(), section.form, max_positions=section.learner.max_positions)
        self.model.check_tokenizer(self.parts.policy.tokenizer, f"reward_model.model {section.model!r}")
        learner = RewardLearner(
            self.model,
            section.learner,
            compute_dtype=self.parts.policy.compute_dtype,
            total_steps=self.steps,
        )
        step = 0
        for epoch in range(section.epochs):
            order = list(range(len(self.training)))
            random.Random(self._seed("epoch", epoch)).shuffle(order)
            for start in range(0, len(order), section.batch):
                batch = [self.training[place] for place in order[start : start + section.batch]]
                stats = learner.update(batch)
                step += 1
                done(step, stats)
                await asyncio.sleep(0)  # an interrupt is seen between steps
        numbers: dict[str, float] = {}
        if section.centre and section.form == "outcome":
            numbers["centre"] = learner.centre(self.training)
        for name, groups in (("train", self.training), ("held_out", self.held_out)):
            if groups:
                numbers |= {f"{name}/{key}": value for key, value in learner.measure(groups).items()}
        return numbers

    def save(self, run: Path) -> Path:
        """Keep the model in the run's folder; returns where."""
        if self.model is None:
            raise RuntimeError("learn before save")
        self.model.save(run / REWARD_MODEL, f"trained on {len(self.training)} groups")
        return run / REWARD_MODEL

    def _origin(self) -> Policy:
        """What the reward model starts as."""
        policy = self.parts.policy
        if self.section.model is None:
            return policy
        own = self.parts.recipe.model
        return load_policy(PretrainedModel(source=self.section.model, dtype=own.dtype, device=own.device))

    def _seed(self, *purpose: int | str) -> int:
        return seed_for(self.parts.recipe.seed, REWARD_MODEL, *purpose)
