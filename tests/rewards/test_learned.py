"""Rewards that a model gives: batches of what ends together, steps, folders, and being asked too soon."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from renma.errors import ModelError, RunError
from renma.learning.reward_model import Form, RewardModel, reading
from renma.models.policy import Policy
from renma.recipe import Component
from renma.rewards.base import NamedReward, build_rewards, combine_rows
from renma.rewards.learned import OutcomeModelReward, ProcessModelReward, ScoreBatch, learned, prepare, ready
from renma.types import Trajectory
from tests.learning.test_reward_model import episode, policy, reward_model


def model(form: Form = "outcome") -> RewardModel:
    return reward_model(form, random_head=True)


class Counting(RewardModel):
    """Says how many were scored at a time."""

    sizes: list[int]

    def scores(self, readings: Any) -> Any:
        self.sizes.append(len(readings))
        return super().scores(readings)


def counting() -> Counting:
    made = model()
    made.__class__ = Counting
    assert isinstance(made, Counting)
    made.sizes = []
    return made


EPISODES = [episode(seed) for seed in range(6)]


async def asked(batch: ScoreBatch, delays: list[int]) -> list[float]:
    async def one(trajectory: Trajectory, delay: int) -> float:
        for _ in range(delay):
            await asyncio.sleep(0)
        return float((await batch.score(reading(trajectory, "outcome")))[0])

    return list(await asyncio.gather(*map(one, EPISODES, delays)))


def test_what_is_awaited_together_is_scored_together() -> None:
    own = counting()
    batch = ScoreBatch(own)
    alone = [scores[0] for scores in model().judge(EPISODES)]
    assert asyncio.run(asked(batch, [0] * 6)) == pytest.approx(alone, abs=3e-6)
    assert own.sizes == [6]
    asyncio.run(asked(batch, [0, 0, 0, 1, 2, 30]))
    assert own.sizes[1:] == [5, 1], "turn after turn that brings more is one batch; what comes later is the next"


def test_scored_each_alone_no_bit_depends_on_the_others() -> None:
    batch = ScoreBatch(model(), together=False)
    first = asyncio.run(asked(batch, [0] * 6))
    assert batch.calls == 6
    assert asyncio.run(asked(batch, [3, 0, 9, 1, 0, 2])) == first


def test_one_that_is_withdrawn_and_a_loop_that_ends_leave_the_batch_usable() -> None:
    own = counting()
    batch = ScoreBatch(own)

    async def withdrawn() -> None:
        jobs = [asyncio.create_task(batch.score(reading(one, "outcome"))) for one in EPISODES[:3]]
        await asyncio.sleep(0)
        jobs[1].cancel()
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in results] == [False, True, False]

    asyncio.run(withdrawn())
    assert own.sizes == [2]

    async def gives_up() -> None:
        asyncio.create_task(batch.score(reading(EPISODES[0], "outcome")))  # noqa: RUF006
        await asyncio.sleep(0)

    asyncio.run(gives_up())
    assert asyncio.run(asked(batch, [0] * 6)) == pytest.approx([s[0] for s in model().judge(EPISODES)], abs=3e-6)


def test_an_error_reaches_every_one_that_waits() -> None:
    class Broken(RewardModel):
        def scores(self, readings: Any) -> Any:
            raise ZeroDivisionError

    own = model()
    own.__class__ = Broken
    batch = ScoreBatch(own)

    async def all_fail() -> list[Any]:
        jobs = (batch.score(reading(one, "outcome")) for one in EPISODES)
        return list(await asyncio.gather(*jobs, return_exceptions=True))

    assert [type(result) for result in asyncio.run(all_fail())] == [ZeroDivisionError] * 6


def test_process_scores_land_on_steps_and_gains_add_up_to_the_last() -> None:
    own = model("process")
    plain, gain = ProcessModelReward(), ProcessModelReward(gain=True)
    for reward in (plain, gain):
        reward.use(own)
    rows = asyncio.run(combine_rows([NamedReward("p", plain, 2.0), NamedReward("g", gain)], EPISODES))
    for row, scores in zip(rows, own.judge(EPISODES), strict=True):
        assert row.outcome == {}
        assert [step["p"] for step in row.steps] == pytest.approx([2 * float(s or 0) for s in scores], abs=3e-6)
        assert np.cumsum([step["g"] for step in row.steps]) == pytest.approx(np.array(scores, float), abs=3e-6)


def saved(folder: Path, form: Form = "outcome", own: Policy | None = None) -> RewardModel:
    made = RewardModel.start(own or policy(), form)
    torch.nn.init.normal_(made.head.weight, generator=torch.Generator().manual_seed(1))
    made.save(folder)
    return made


def test_a_recipe_names_a_folder_or_the_stage(tmp_path: Path) -> None:
    own = policy()
    made = saved(tmp_path / "it", own=own)
    components: list[dict[str, Any]] = [
        {"type": "reward_model"},
        {"type": "reward_model", "source": str(tmp_path / "it"), "name": "again", "weight": 0.5},
        {"type": "success"},
    ]
    rewards = build_rewards([Component(**component) for component in components])
    assert [reward.name for reward in ready(rewards)] == ["success"]
    assert len(learned(rewards)) == 2
    with pytest.raises(RunError, match="before it has been trained"):
        asyncio.run(combine_rows(rewards, EPISODES))
    with pytest.raises(RunError, match="trains no reward model"):
        prepare(rewards, own, stage=None)
    prepare(rewards, own, stage=tmp_path / "it")
    assert len(ready(rewards)) == 3
    for row, [score] in zip(asyncio.run(combine_rows(rewards, EPISODES)), made.judge(EPISODES), strict=True):
        assert score is not None
        assert row.outcome["reward_model"] == pytest.approx(score, abs=3e-6)
        assert row.outcome["again"] == pytest.approx(score / 2, abs=3e-6)


def test_folders_that_cannot_judge_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no folder"):
        OutcomeModelReward(source=str(tmp_path / "nowhere"))
    saved(tmp_path / "steps", "process")
    rewards = [NamedReward("r", OutcomeModelReward(source=str(tmp_path / "steps")))]
    with pytest.raises(ModelError, match="has the process form, not outcome"):
        prepare(rewards, policy(), stage=None)
    other = policy()
    other.tokenizer.add_tokens(["new"])
    with pytest.raises(ModelError, match="another tokenizer"):
        prepare([NamedReward("r", ProcessModelReward(source=str(tmp_path / "steps")))], other, stage=None)
