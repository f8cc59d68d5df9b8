"""Preferences, a reward model, its scores as rewards: the pipeline on a policy of a few thousand parameters."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from renma.errors import RecipeError, RunError
from renma.learning.reward_model import HEAD
from renma.models.policy import Policy, load_policy, save_policy
from renma.preferences.base import LABEL
from renma.recipe import Component, LearnerSection, RewardModelSection
from renma.recipe_load import load_recipe
from renma.rewards.base import build_rewards
from renma.rewards.learned import learned, prepare
from renma.training.reward_stage import REWARD_MODEL, RewardStage, check_reward_model
from renma.training.setup import Parts, assemble
from renma.types import Group, Trajectory
from tests.end_to_end.tiny import TINY

JUDGES = [{"type": "tests.preferences.test_pipeline:low"}]
SETTINGS = LearnerSection(learning_rate=1e-2)
SYMBOLS = torch.arange(20, 28)


def low(trajectory: Trajectory) -> float:
    """The share of the four lower of the eight symbols that the policy can emit."""
    ids = np.concatenate([step.action_ids for step in trajectory.steps])
    return float(np.mean(ids < 24))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _few_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained policy writes at random: of eight symbols, some can be met often enough to learn of each."""

    def load(*given: Any, **options: Any) -> Policy:
        return replace(load_policy(*given, **options), output_ids=SYMBOLS)

    monkeypatch.setattr("renma.training.setup.load_policy", load)


def parts(rewards: list[dict[str, Any]]) -> Parts:
    changes = {"cold_start": None, "evaluation": {}, "rewards": rewards, "sampling": {"max_tokens": 8}}
    return assemble(load_recipe({**TINY, **changes}))


def sampled(**options: Any) -> Component:
    return Component(type="sampled", **({"groups": 48, "group_size": 4, "rewards": JUDGES} | options))


def test_sampled_preferences_make_a_reward_model_whose_scores_are_rewards(tmp_path: Path) -> None:
    own = parts([{"type": "reward_model", "weight": 2.0}])
    section = RewardModelSection(preferences=sampled(), held_out=0.25, epochs=3, batch=16, learner=SETTINGS)
    check_reward_model(section, own.runner.rewards)
    reports: list[tuple[int, dict[str, float]]] = []
    weights = {name: value.clone() for name, value in own.policy.model.state_dict().items()}

    async def run() -> tuple[dict[str, float], list[Group]]:
        await own.engine.load_weights(0)
        stage = RewardStage(own, section)
        found = await stage.gather()
        total = stage.steps
        numbers = await stage.learn(lambda step, stats: reports.append((step, stats)))
        assert [step for step, _ in reports] == list(range(1, total + 1))
        assert numbers["train/items"] + numbers["held_out/items"] == len(found)
        folder = stage.save(tmp_path)
        assert (tmp_path / REWARD_MODEL / HEAD).is_file()
        prepare(own.runner.rewards, own.policy, stage=folder)
        tasks = [own.task_at(100 + place) for place in range(4)]
        return numbers, await own.runner.groups(tasks, 8, first=100)

    numbers, groups = asyncio.run(run())
    assert numbers["held_out/accuracy"] > 0.8, numbers
    assert numbers["train/loss"] < np.log(2)
    assert all(torch.equal(value, weights[name]) for name, value in own.policy.model.state_dict().items())
    # The learned rewards order fresh samples as the true ones do.
    [function] = learned(own.runner.rewards)
    episodes = [t for group in groups for t in group.trainable]
    scores = [t.rewards["reward_model"] for t in episodes]
    assert all(set(t.rewards) == {"reward_model"} and not any(s.reward for s in t.steps) for t in episodes)
    assert asyncio.run(function(episodes[0])) == pytest.approx(scores[0] / 2, abs=3e-6)  # type: ignore[operator]
    assert np.corrcoef(scores, [low(t) for t in episodes])[0, 1] > 0.5


def test_a_process_reward_model_from_outcomes_rewards_steps(tmp_path: Path) -> None:
    own = parts([{"type": "process_reward_model"}])
    component = sampled(groups=16, threshold=0.5)
    section = RewardModelSection(form="process", preferences=component, epochs=2, batch=4, learner=SETTINGS)
    check_reward_model(section, own.runner.rewards)

    async def run() -> tuple[list[Group], dict[str, float], list[Group]]:
        await own.engine.load_weights(0)
        stage = RewardStage(own, section)
        found = await stage.gather()
        numbers = await stage.learn(lambda step, stats: None)
        prepare(own.runner.rewards, own.policy, stage=stage.save(tmp_path), together=False)
        return found, numbers, await own.runner.groups([own.task_at(50)], 4, first=50)

    found, numbers, groups = asyncio.run(run())
    assert {LABEL} == {name for group in found for t in group.trainable for s in t.steps for name in s.reward}
    assert numbers["train/loss"] < np.log(2) and "centre" not in numbers
    for t in groups[0].trainable:
        assert not t.rewards
        assert all(0 < step.reward["process_reward_model"] < 1 for step in t.steps)


def test_preferences_that_all_say_the_same_end_with_the_reason() -> None:
    own = parts([])
    stage = RewardStage(own, RewardModelSection(preferences=sampled(rewards=[{"type": "success"}], groups=2)))

    async def run() -> None:
        await own.engine.load_weights(0)
        await stage.gather()

    with pytest.raises(RunError, match="reward_model: the source 'sampled' has nothing to learn from"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("section", "rewards", "message"),
    [
        (None, [{"type": "reward_model"}], "no reward_model section"),
        ({}, [{"type": "process_reward_model"}], "'outcome', but a reward asks for the process form"),
        ({"form": "process"}, [{"type": "reward_model"}], "'process', but a reward asks for the outcome form"),
        ({"preferences": {"type": "sampeld"}}, [], "reward_model.preferences: .*did you mean 'sampled'"),
        ({"preferences": {"type": "sampled", "group": 3}}, [], "reward_model.preferences.group: "),
        ({"preferences": {"type": "sampled", "rewards": [{"type": "reward_model"}]}}, [], "name verifiers here"),
        ({"preferences": {"type": "sampled", "rewards": [{"type": "sucess"}]}}, [], r"rewards\.0: .*'success'"),
        ({"preferences": {"type": "step_labels", "path": "x"}}, [], "nothing that the outcome form learns from"),
        ({"form": "process", "preferences": {"type": "jsonl", "path": "x"}}, [], "nothing that the process form"),
    ],
)
def test_contradictions_are_found_before_anything_runs(
    section: dict[str, Any] | None, rewards: list[dict[str, Any]], message: str
) -> None:
    made = None if section is None else RewardModelSection(**section)
    with pytest.raises(RecipeError, match=message):
        check_reward_model(made, build_rewards([Component(**one) for one in rewards]))


def test_a_reward_model_may_start_from_another_folder_with_the_same_tokenizer(tmp_path: Path) -> None:
    own = parts([])
    save_policy(own.policy, tmp_path / "base")
    section = RewardModelSection(preferences=sampled(groups=4), model=str(tmp_path / "base"), batch=2, learner=SETTINGS)

    async def run(section: RewardModelSection) -> dict[str, float]:
        await own.engine.load_weights(0)
        stage = RewardStage(own, section)
        await stage.gather()
        return await stage.learn(lambda step, stats: None)

    a, b = asyncio.run(run(section)), asyncio.run(run(section.model_copy(update={"model": None})))
    assert a == pytest.approx(b, abs=1e-5), "the policy's own weights, from a folder"


def test_the_rewards_of_a_run_do_not_judge_its_preferences() -> None:
    own = parts([{"type": "reward_model"}])
    assert replace(own.runner).rewards, "the run's own reward waits for the model"
    source = RewardStage(own, RewardModelSection(preferences=sampled(groups=2)))

    async def run() -> list[Group]:
        await own.engine.load_weights(0)
        return await source.gather()

    assert asyncio.run(run())
