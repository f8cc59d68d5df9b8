"""Cases 8.3 and 8.6: no place waits for the longest answer, and nothing waits for rewards."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

from renma.agents.base import Turn
from renma.environments.base import Environment
from renma.inference.base import Sample
from renma.profiling import recording
from renma.recipe_load import load_recipe
from renma.rewards.base import NamedReward, RewardError, combine
from renma.rollout.episode import EpisodeRules
from renma.rollout.runner import Runner
from renma.rollout.threads import call, may_block
from renma.training.batch import Sampled
from renma.training.batch_metrics import idle_workers
from renma.training.setup import assemble
from renma.types import Action, Group, Observation, StepResult, Task, Trajectory
from tests.end_to_end.tiny import TINY
from tests.rollout.test_runner import FakeEngine

T = TypeVar("T")
PATIENCE = 20.0  # seconds before a test gives up on what should come at once


class OneStep(Environment):
    blocking = False

    async def reset(self, task: Task) -> str:  # type: ignore[override]
        return task.prompt

    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        return StepResult(reward=1.0, terminated=True, info={"success": True})


class Writes:
    """Acts once, after `before` has been awaited."""

    def __init__(self, before: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.before = before

    async def act(self, observation: Observation) -> Turn:
        await self.before()
        ids = np.array([5, 6], np.int32)
        sample = Sample(ids, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")
        return Turn(np.array([1], np.int32), sample, Action("x", raw="x"))


async def at_once() -> None:
    return None


def runner_of(
    before: Callable[[Task], Coroutine[Any, Any, None]] = lambda task: at_once(),
    rewards: tuple[NamedReward, ...] = (),
    concurrency: int = 8,
    **more: Any,
) -> Runner:
    def agent(engine: Any, task: Task, member: int, tools: Any, seeds: Any, key: Any) -> Writes:
        return Writes(lambda: before(task))

    return Runner(FakeEngine(), OneStep, agent, EpisodeRules(2, 1), rewards, 1, concurrency, **more)  # type: ignore[arg-type]


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time: where nothing else is to be done the clock jumps."""

    def __init__(self) -> None:
        self.now = 0.0
        loop = self

        class Jumping(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> Any:
                found = super().select(timeout if timeout is None else 0)
                if timeout and not found:
                    loop.now += timeout
                return found

        super().__init__(Jumping())

    def time(self) -> float:
        return self.now


def virtually(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result, and the seconds that it took on a clock of its own."""
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        result = runner.run(work)
        return result, runner.get_loop().time()


def test_case_8_3_one_queue_ends_with_the_longest_and_an_even_split_does_not() -> None:
    tasks = [Task(str(number), str(100 if number == 0 else 10)) for number in range(13)]

    async def length(task: Task) -> None:
        await asyncio.sleep(int(task.prompt))

    queue = runner_of(length, concurrency=4)
    groups, seconds = virtually(queue.groups(tasks, 1))
    assert seconds == pytest.approx(100, abs=1e-3)
    assert queue.engine.most == 4, "all workers used"  # type: ignore[attr-defined]
    assert [group.task for group in groups] == tasks

    async def split() -> None:
        parts = [tasks[:4], tasks[4:7], tasks[7:10], tasks[10:]]
        await asyncio.gather(*(runner_of(length, concurrency=1).groups(part, 1) for part in parts))

    assert virtually(split())[1] == pytest.approx(130, abs=1e-3)


def test_case_8_3_how_long_workers_are_idle_is_told() -> None:
    def sampled(*seconds: float, took: float) -> Sampled:
        task = Task("t", "p")
        attempts = [Trajectory(task, 0, (), "done", "answer", seconds=s) for s in seconds]
        return Sampled([Group(task, (attempt,)) for attempt in attempts], seconds=took)

    assert idle_workers(sampled(100, *[10] * 12, took=100), 4) == {"seconds_workers_idle": pytest.approx(45)}
    assert idle_workers(sampled(10, 8, took=10), 64) == {"seconds_workers_idle": pytest.approx(1)}, "of 2 that work"
    assert idle_workers(sampled(took=0), 4) == {}


def test_case_8_6_eight_rewards_on_eight_workers_run_at_once() -> None:
    together = threading.Barrier(8)

    def slow(trajectory: Trajectory) -> float:
        together.wait(PATIENCE)  # passed when all eight are here
        return 0.5

    tasks = [Task(str(number), "") for number in range(8)]
    groups = asyncio.run(runner_of(rewards=(NamedReward("slow", slow),)).groups(tasks, 1))
    assert [t.ret for group in groups for t in group.trajectories] == [0.5] * 8


def test_case_8_6_no_more_than_the_reward_workers_run_at_once() -> None:
    lock, running, most = threading.Lock(), 0, 0
    pairs = threading.Barrier(2)

    def counted(trajectory: Trajectory) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pairs.wait(PATIENCE)
        with lock:
            running -= 1
        pairs.wait(PATIENCE)
        return 1.0

    tasks = [Task(str(number), "") for number in range(6)]
    runner = runner_of(rewards=(NamedReward("counted", counted),), reward_workers=2)
    groups = asyncio.run(runner.groups(tasks, 1))
    assert most == 2 and all(t.status == "done" for group in groups for t in group.trajectories)


class Meeting:
    """A reward of the first trajectory that waits, in a thread or in the loop, until the last episode is sampled."""

    def __init__(self, last: str) -> None:
        self.last, self.reached, self.waited = last, threading.Event(), False
        self.reached_async = asyncio.Event()

    async def before(self, task: Task) -> None:
        await asyncio.sleep(0)  # as an engine gives way
        if task.id == self.last:
            self.reached.set()
            self.reached_async.set()

    def plain(self, trajectory: Trajectory) -> float:
        if trajectory.task.id == "0":
            self.waited = self.reached.wait(PATIENCE)
        return 1.0

    async def waiting(self, trajectory: Trajectory) -> float:
        if trajectory.task.id == "0":
            async with asyncio.timeout(PATIENCE):
                await self.reached_async.wait()
            self.waited = True
        return 1.0


@pytest.mark.parametrize("kind", ["plain", "waiting"])
def test_case_8_6_rewards_overlap_generation_in_the_timeline(kind: str) -> None:
    meeting = Meeting(last="3")
    runner = runner_of(meeting.before, (NamedReward("meets", getattr(meeting, kind)),), concurrency=1)
    with recording() as found:
        groups = asyncio.run(runner.groups([Task(str(number), "") for number in range(4)], 1))
    assert meeting.waited, "the only worker went on while the first reward was still out"
    assert [group.trajectories[0].ret for group in groups] == [1.0] * 4
    episodes = [span for span in found.spans if span.name == "episode"]
    longest = max((span for span in found.spans if span.name == "reward"), key=lambda span: span.end - span.start)
    inside = [span for span in episodes if longest.start <= span.start and span.end <= longest.end]
    assert len(episodes) == 4 and len(inside) >= 2


def test_case_8_6_an_engine_that_waits_for_open_episodes_does_not_wait_for_rewards() -> None:
    recipe = load_recipe(
        {**TINY, "cold_start": None, "evaluation": {}, "rewards": [], "rollout": {"deterministic": True}}
    )
    parts = assemble(recipe)
    ended: list[Trajectory] = []
    second = threading.Event()

    def first_waits(trajectory: Trajectory) -> float:
        if trajectory.member == 0:
            assert second.wait(PATIENCE), "the engine stood still"
        return 1.0

    def done(trajectory: Trajectory) -> None:
        ended.append(trajectory)
        if len(ended) == 3:
            second.set()

    runner = replace(parts.runner, rewards=(NamedReward("waits", first_waits),), concurrency=2)
    groups = asyncio.run(runner.groups([parts.task_at(0)], 4, done=done))
    assert [t.status for t in groups[0].trajectories] != [] and all(t.ret == 1.0 for t in groups[0].trajectories)
    assert ended[-1].member == 0


def test_an_instant_reward_is_called_where_it_is_and_a_plain_one_in_a_thread() -> None:
    where: dict[str, int] = {}

    def here(trajectory: Trajectory) -> float:
        where["here"] = threading.get_ident()
        return 1.0

    here.blocking = False  # type: ignore[attr-defined]

    def there(trajectory: Trajectory, scale: float) -> float:
        where["there"] = threading.get_ident()
        return scale

    rewards = (NamedReward("here", here), NamedReward("there", partial(there, scale=2.0)))
    assert [(r.instant, r.blocking) for r in rewards] == [(True, False), (False, True)]
    asyncio.run(runner_of(rewards=rewards).groups([Task("0", "")], 1))
    assert where["here"] == threading.get_ident() != where["there"]


def test_a_reward_that_is_not_thread_safe_never_runs_beside_itself() -> None:
    inside = threading.Lock()

    class Careful:
        thread_safe = False

        def __call__(self, trajectory: Trajectory) -> float:
            assert inside.acquire(blocking=False), "two at once"
            for _ in range(20):
                time.sleep(0)  # lets the other threads run
            inside.release()
            return 1.0

    groups = asyncio.run(runner_of(rewards=(NamedReward("careful", Careful()),)).groups([Task("0", "")], 8))
    assert [t.error for t in groups[0].trajectories] == [None] * 8


def test_an_error_of_a_reward_in_a_thread_ends_the_run_and_its_workers() -> None:
    def grade(trajectory: Trajectory) -> list[float]:
        return [1.0, 2.0]

    runner = runner_of(rewards=(NamedReward("grade", grade),), concurrency=2)
    with pytest.raises(RewardError, match="'grade' gave 2 numbers for the 1 steps"):
        asyncio.run(runner.groups([Task(str(number), "") for number in range(6)], 2))
    assert runner.engine.open == 0  # type: ignore[attr-defined]


def test_a_stop_iteration_in_a_thread_does_not_hang() -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            await call(lambda: next(iter(())))

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(main())


def test_a_subclass_has_to_say_for_itself_that_it_does_not_block() -> None:
    class Slow(OneStep):
        def reset(self, task: Task) -> str:  # type: ignore[override]
            return task.prompt

    assert not may_block(OneStep) and not may_block(OneStep().close) and not may_block(partial(OneStep))
    assert may_block(Slow) and may_block(Slow().reset) and may_block(len) and may_block(lambda: 1)
    assert not may_block(Slow().step), "async"


def test_combine_takes_rewards_of_every_kind() -> None:
    async def late(trajectory: Trajectory) -> float:
        return 2.0

    rewards = [NamedReward("late", late), NamedReward("later", lambda t: late(t), 2.0), NamedReward("now", lambda t: 1)]
    task = Task("t", "p")
    found = asyncio.run(combine(rewards, Trajectory(task, 0, (), "done", "answer")))
    assert found.outcome == {"late": 2.0, "later": 4.0, "now": 1.0}
