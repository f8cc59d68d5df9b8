"""Groups of episodes: seeds, order, failures, rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from renma.agents.base import Turn
from renma.environments.base import Environment
from renma.inference.base import Sample
from renma.rewards.base import NamedReward, RewardError
from renma.rollout.episode import EpisodeRules
from renma.rollout.runner import Runner
from renma.types import Action, Group, Observation, StepResult, Task, Trajectory

TASKS = [Task(str(i), f"task {i}") for i in range(6)]


class FakeEngine:
    """Counts how many episodes are open."""

    context, version, has_logprobs = 100, 0, True

    def __init__(self) -> None:
        self.open = self.most = 0

    def episode_opened(self) -> None:
        self.open += 1
        self.most = max(self.most, self.open)

    def episode_closed(self) -> None:
        self.open -= 1


class SeedAgent:
    """Writes its own seed as its action, after as many yields to the other episodes as `delay` says."""

    def __init__(self, seeds: Callable[[int], int], delay: int) -> None:
        self.seeds, self.delay = seeds, delay

    async def act(self, observation: Observation) -> Turn:
        for _ in range(self.delay):
            await asyncio.sleep(0)
        ids = np.array([self.seeds(0) % 30000, self.seeds(1) % 30000], np.int32)
        sample = Sample(ids, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")
        return Turn(np.array([1], np.int32), sample, Action("x", raw="x"))


class OneStep(Environment):
    async def reset(self, task: Task) -> str:  # type: ignore[override]
        return task.prompt

    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        return StepResult(reward=1.0, terminated=True, info={"success": True})


def run(
    *,
    seed: int = 1,
    delay: Callable[[Task, int], int] = lambda task, member: 0,
    make: Callable[[], Environment] = OneStep,
    rewards: tuple[NamedReward, ...] = (),
    concurrency: int = 4,
    engine: Any = None,
    first: int = 0,
) -> list[Group]:
    def agent(engine: Any, task: Task, member: int, tools: Any, seeds: Any, key: Any) -> SeedAgent:
        return SeedAgent(seeds, delay(task, member))

    runner = Runner(engine or FakeEngine(), make, agent, EpisodeRules(2, 1), rewards, seed, concurrency)
    return asyncio.run(runner.groups(TASKS, 4, first=first))


def ids(groups: list[Group]) -> list[list[int]]:
    return [t.steps[0].action_ids.tolist() for g in groups for t in g.trajectories]


def test_case_7_9_seeds_depend_on_run_task_member_and_turn_only() -> None:
    plain = ids(run())
    assert plain == ids(run(delay=lambda task, member: (7 * int(task.id) + 5 * member) % 11))
    assert plain == ids(run(concurrency=24))
    assert plain != ids(run(seed=2))
    assert plain != ids(run(first=6)), "a task met again later is sampled afresh"
    assert len({tuple(i) for i in plain}) == len(plain)
    assert all(a != b for a, b in plain), "turns differ"


def test_groups_keep_the_order_of_tasks_and_members() -> None:
    groups = run(delay=lambda task, member: 10 - int(task.id) - member)
    assert [g.task.id for g in groups] == [t.id for t in TASKS]
    assert all([t.member for t in g.trajectories] == [0, 1, 2, 3] for g in groups)


def test_concurrency_is_a_bound_and_every_place_is_given_back() -> None:
    engine = FakeEngine()
    run(engine=engine, concurrency=3)
    assert (engine.most, engine.open) == (3, 0)


def test_case_5_2_others_finish_when_one_task_always_fails() -> None:
    class FailsOnTwo(OneStep):
        async def reset(self, task: Task) -> str:  # type: ignore[override]
            if task.id == "2":
                raise OSError("no page")
            return task.prompt

    groups = run(make=FailsOnTwo)
    assert [len(g.trainable) for g in groups] == [4, 4, 0, 4, 4, 4]
    assert {t.error for t in groups[2].trajectories} == {"OSError: no page"}
    assert {t.attempts for t in groups[2].trajectories} == {2}


def test_case_5_2_an_interrupt_stops_everything() -> None:
    class Interrupted(OneStep):
        async def step(self, action: Action) -> StepResult:  # type: ignore[override]
            raise KeyboardInterrupt

    engine = FakeEngine()
    with pytest.raises(KeyboardInterrupt):
        run(make=Interrupted, engine=engine)


def test_the_recipes_rewards_take_the_place_of_the_environments() -> None:
    rewards = (NamedReward("half", lambda t: 0.5, 2.0), NamedReward("mute", lambda t: None))
    groups = run(rewards=rewards)
    assert {t.ret for g in groups for t in g.trajectories} == {1.0}
    assert groups[0].trajectories[0].rewards == {"half": 1.0}


def test_a_reward_that_raises_fails_its_trajectory_only() -> None:
    def picky(trajectory: Trajectory) -> float:
        if trajectory.member == 1:
            raise ZeroDivisionError("division by zero")
        return 1.0

    groups = run(rewards=(NamedReward("picky", picky),))
    failed = [t for g in groups for t in g.trajectories if t.status == "failed"]
    assert len(failed) == 6
    assert {(t.stop_reason, t.error) for t in failed} == {("reward_error", "ZeroDivisionError: division by zero")}


def test_case_2_12_rewards_that_all_abstain_are_an_error_that_names_the_row() -> None:
    with pytest.raises(RewardError, match=r"task '0' member 0"):
        run(rewards=(NamedReward("mute", lambda t: None),))


def test_case_10_7_process_rewards_take_the_place_of_the_steps_own() -> None:
    class TwoSteps(OneStep):
        async def step(self, action: Action) -> StepResult:  # type: ignore[override]
            return StepResult(reward=1.0, info={"success": False})

    rewards = (NamedReward("grade", lambda t: [0.25, None], 2.0), NamedReward("whole", lambda t: 1.0))
    groups = run(make=TwoSteps, rewards=rewards)
    for trajectory in (t for g in groups for t in g.trajectories):
        assert [dict(step.reward) for step in trajectory.steps] == [{"grade": 0.5}, {}]
        assert trajectory.step_rewards == [0.5, 1.0]
        assert trajectory.reward_seconds > 0


def test_of_one_step_an_outcome_and_a_process_reward_are_the_same() -> None:
    whole = run(rewards=(NamedReward("one", lambda t: 0.7),))
    steps = run(rewards=(NamedReward("one", lambda t: [0.7]),))
    for a, b in zip(whole, steps, strict=True):
        assert [t.step_rewards for t in a.trajectories] == [t.step_rewards for t in b.trajectories] == [[0.7]] * 4


def test_process_rewards_of_the_wrong_length_stop_the_run() -> None:
    with pytest.raises(RewardError, match=r"'grade' gave 2 numbers for the 1 steps of task '0' member 0"):
        run(rewards=(NamedReward("grade", lambda t: [1.0, 2.0]),))
