"""Episodes: endings kept apart, failures retried and never scored, environments closed exactly once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from renma.agents.base import ContextFull, Turn
from renma.environments.base import Environment
from renma.inference.base import Sample
from renma.rollout.episode import EpisodeRules, run_episode
from renma.types import Action, Observation, StepResult, Task, Trajectory

TASK = Task("t", "say hello")


class Talker:
    """An agent that says the same two tokens for ever."""

    def __init__(self, stop: str = "stop", room: int = 1000) -> None:
        self.stop, self.room, self.turns = stop, room, 0

    async def act(self, observation: Observation) -> Turn:
        if self.turns >= self.room:
            raise ContextFull
        self.turns += 1
        ids = np.array([5, 6], np.int32)
        sample = Sample(ids, np.array([-0.5, -0.1], np.float32), np.zeros(2, np.int32), self.stop)  # type: ignore[arg-type]
        return Turn(np.array([1, 2, 3], np.int32), sample, Action("hello", raw="hello"))


class Counting(Environment):
    """Ends after `turns` steps; counts its own making and closing."""

    closed: int = 0
    made: int = 0

    def __init__(self, turns: int = 2, won: bool = True, fail_at: str = "", fail_times: int = 99) -> None:
        self.turns, self.won, self.fail_at, self.fail_times = turns, won, fail_at, fail_times
        self.n = 0
        type(self).made += 1

    def _maybe_fail(self, where: str) -> None:
        if self.fail_at == where and type(self).made <= self.fail_times:
            raise OSError(f"no {where}")

    def reset(self, task: Task) -> str:
        self._maybe_fail("reset")
        return task.prompt

    def step(self, action: Action) -> StepResult:
        self._maybe_fail("step")
        self.n += 1
        over = self.n >= self.turns
        return StepResult(
            "go on", float(over and self.won), terminated=over, info={"success": self.won} if over else {}
        )

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture(autouse=True)
def _fresh_counts() -> None:
    Counting.made = Counting.closed = 0


def run(make: Callable[[], Environment], agent: Any = None, rules: EpisodeRules | None = None) -> Trajectory:
    return asyncio.run(
        run_episode(TASK, 0, make, lambda task, member, tools: agent or Talker(), rules or EpisodeRules(max_turns=8))
    )


def test_an_answered_episode_is_done_and_successful() -> None:
    t = run(lambda: Counting(2))
    assert (t.status, t.stop_reason, t.success, t.ret) == ("done", "answer", True, 1.0)
    assert [s.terminated for s in t.steps] == [False, True]
    assert t.sampled_tokens == 4


def test_case_3_25_the_step_limit_is_not_success() -> None:
    t = run(lambda: Counting(50), rules=EpisodeRules(max_turns=3))
    assert (t.status, t.stop_reason, t.success, t.ret) == ("truncated", "step_limit", False, 0.0)
    assert [s.truncated for s in t.steps] == [False, False, True]
    won = run(lambda: Counting(3, won=True), rules=EpisodeRules(max_turns=3))
    assert (won.status, won.success, won.ret) == ("done", True, 1.0)


def test_case_1_12_a_full_context_ends_the_episode_and_keeps_its_rewards() -> None:
    t = run(lambda: Counting(50), agent=Talker(room=2))
    assert (t.status, t.stop_reason, len(t.steps)) == ("truncated", "context", 2)


def test_an_action_cut_at_its_length_is_flagged() -> None:
    t = run(lambda: Counting(1, won=False), agent=Talker(stop="length"))
    assert (t.status, t.stop_reason) == ("truncated", "length")


def test_case_5_2_a_failing_environment_is_replaced_then_given_up() -> None:
    t = run(lambda: Counting(2, fail_at="step", fail_times=2), rules=EpisodeRules(max_turns=8, retries=2))
    assert (t.status, t.attempts, Counting.made, Counting.closed) == ("done", 3, 3, 3)
    Counting.made = Counting.closed = 0
    t = run(lambda: Counting(2, fail_at="step"), rules=EpisodeRules(max_turns=8, retries=2))
    assert (t.status, t.stop_reason, t.error) == ("failed", "environment_error", "OSError: no step")
    assert not t.trainable
    assert (Counting.made, Counting.closed) == (3, 3)


def test_case_5_13_cleanup_runs_once_and_the_first_error_is_kept() -> None:
    class Broken(Counting):
        def close(self) -> None:
            super().close()
            raise RuntimeError("close failed too")

    t = run(lambda: Broken(2, fail_at="reset"), rules=EpisodeRules(max_turns=8, retries=0))
    assert t.error == "OSError: no reset"
    assert Broken.closed == 1


def test_case_5_1_a_stuck_member_is_failed_within_its_limit() -> None:
    release = threading.Event()

    class Stuck(Counting):
        def step(self, action: Action) -> StepResult:
            release.wait()
            return super().step(action)

    class StuckAsync(Counting):
        async def step(self, action: Action) -> StepResult:  # type: ignore[override]
            await asyncio.Event().wait()
            return StepResult()

    try:
        for kind in (Stuck, StuckAsync):
            t = run(lambda kind=kind: kind(2), rules=EpisodeRules(max_turns=8, seconds=0.05))
            assert (t.status, t.stop_reason) == ("failed", "time")
    finally:
        release.set()


def test_an_interrupt_is_not_a_failed_episode() -> None:
    class Interrupting(Counting):
        async def step(self, action: Action) -> StepResult:  # type: ignore[override]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(lambda: Interrupting(2))


def test_a_step_that_returns_something_else_is_named() -> None:
    class Wrong(Counting):
        def step(self, action: Action) -> StepResult:
            return (1, 2)  # type: ignore[return-value]

    t = run(lambda: Wrong(), rules=EpisodeRules(max_turns=2, retries=0))
    assert t.error == "TypeError: Wrong.step returned tuple; return a StepResult"


def test_an_engine_failure_is_no_environment_failure_and_is_not_retried() -> None:
    class Dead:
        async def act(self, observation: Observation) -> Turn:
            raise ConnectionError("engine gone")

    t = run(lambda: Counting(2), agent=Dead())
    assert (t.status, t.stop_reason, t.attempts) == ("failed", "engine_error", 1)
    assert t.error == "ConnectionError: engine gone"


def test_case_9_6_plain_user_code_runs_in_this_process() -> None:
    seen: list[int] = []

    class Looking(Counting):
        def step(self, action: Action) -> StepResult:
            import os

            seen.append(os.getpid())
            return super().step(action)

    import os

    run(lambda: Looking(1))
    assert seen == [os.getpid()]


class Foreseeing(Talker):
    """Would be shown [7, turns so far]."""

    def next_prompt(self, observation: Observation) -> list[int]:
        assert observation.messages[0].text == "go on"
        return [7, self.turns]


def test_where_a_limit_cuts_the_next_prompt_is_kept() -> None:
    class Cutting(Counting):
        def step(self, action: Action) -> StepResult:
            return StepResult("go on", truncated=super().step(action).terminated)

    for t in (
        run(lambda: Counting(50), agent=Foreseeing(), rules=EpisodeRules(max_turns=3)),
        run(lambda: Cutting(3), agent=Foreseeing()),
        run(lambda: Counting(50), agent=Foreseeing(room=3)),
    ):
        assert t.status == "truncated" and t.next_prompt_ids is not None
        assert t.next_prompt_ids.dtype == np.int32 and t.next_prompt_ids.tolist() == [7, 3]
    cut = run(lambda: Counting(2, won=False), agent=Foreseeing(stop="length"))
    assert cut.stop_reason == "length" and cut.next_prompt_ids is not None
    assert cut.next_prompt_ids.tolist() == [1, 2, 3, 5, 6], "it would have gone on writing"


def test_an_episode_that_ended_or_failed_or_cannot_look_ahead_has_no_next_prompt() -> None:
    class Confused(Foreseeing):
        def next_prompt(self, observation: Observation) -> list[int]:
            raise LookupError("no such template")

    for t in (
        run(lambda: Counting(2), agent=Foreseeing()),
        run(lambda: Counting(2, won=False), agent=Foreseeing()),
        run(lambda: Counting(2, fail_at="step"), agent=Foreseeing(), rules=EpisodeRules(max_turns=2, retries=0)),
        run(lambda: Counting(50), agent=Talker(), rules=EpisodeRules(max_turns=3)),
    ):
        assert t.next_prompt_ids is None
    t = run(lambda: Counting(50), agent=Confused(), rules=EpisodeRules(max_turns=3))
    assert (t.status, t.stop_reason, t.error) == ("failed", "engine_error", "LookupError: no such template")
