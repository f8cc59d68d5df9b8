"""The collapse watch: it names what fell and since when, and does not mistake learning for collapse."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.training.collapse import SIGNALS, CollapseWarning, CollapseWatch, repeated_actions_share
from renma.types import Action, Group, Step, Task, Trajectory

Metrics = dict[str, float]


def watched(trace: Callable[[int], Metrics], steps: int, watch: CollapseWatch | None = None) -> list[CollapseWarning]:
    watch = watch or CollapseWatch()
    warnings = [watch.feed(step, trace(step)) for step in range(1, steps + 1)]
    return [warning for warning in warnings if warning is not None]


def ramp(step: int, first: int, last: int, start: float, end: float) -> float:
    return start + (end - start) * min(max((step - first) / (last - first), 0.0), 1.0)


def shaken(metrics: Metrics, step: int, size: float, seed: int = 0) -> Metrics:
    generator = random.Random(f"{seed}/{step}")
    noisy = {name: value * math.exp(generator.gauss(0, size)) for name, value in metrics.items()}
    return noisy | {
        "success": min(noisy["success"], 1.0),
        "distinct_first_actions": max(1.0, noisy["distinct_first_actions"]),
    }


def echo_trap(step: int) -> Metrics:
    """Success rises to step 40, then the policy begins to repeat itself; the gradient jumps at 60."""
    return shaken(
        {
            "success": ramp(step, 0, 40, 0.15, 0.4) - ramp(step, 45, 80, 0.0, 0.25),
            "return_std_within": ramp(step, 40, 55, 0.45, 0.03),
            "learner/entropy": ramp(step, 35, 55, 1.1, 0.05),
            "learner/grad_norm": 0.5 if step < 60 else 9.0,
            "repeated_actions_share": ramp(step, 45, 65, 0.05, 0.8),
            "distinct_first_actions": ramp(step, 40, 60, 5.5, 1.1),
        },
        step,
        0.05,
    )


def convergence(step: int) -> Metrics:
    """The task is learned: success rises to nearly 1, and with nothing left to find all variety goes."""
    success = ramp(step, 5, 80, 0.1, 0.99)
    return shaken(
        {
            "success": success,
            "return_std_within": 0.9 * math.sqrt(success * (1 - success)),
            "learner/entropy": ramp(step, 0, 90, 1.0, 0.04),
            "learner/grad_norm": ramp(step, 0, 90, 0.6, 0.1),
            "repeated_actions_share": ramp(step, 0, 80, 0.2, 0.02),
            "distinct_first_actions": ramp(step, 0, 80, 6.0, 1.1),
        },
        step,
        0.05,
    )


def test_a_collapse_is_named_signal_by_signal_with_its_beginning() -> None:
    warnings = watched(echo_trap, 100)
    assert warnings
    first = warnings[0]
    assert 45 <= first.since <= 56, "variety is lost between steps 35 and 55"
    assert first.step <= 65, "and that is said before success is gone"
    last = warnings[-1]
    assert {signal.name for signal in last.signals} == {signal.name for signal in SIGNALS}
    for signal in last.signals:
        assert (signal.now > signal.then) == (signal.kind != "falls")
    by_name = {signal.name: signal for signal in last.signals}
    assert by_name["return_std_within"].then == pytest.approx(0.45, rel=0.15)
    assert by_name["learner/grad_norm"].since == 60
    assert len(warnings) <= len(SIGNALS), "each signal is warned of once"
    assert "learner/grad_norm jumped from" in last.text and "since step 60" in last.text
    assert "starpo_s" in last.text and "\n" not in last.text
    assert json.loads(json.dumps(last.data))["since"] == last.since


def test_healthy_convergence_is_no_collapse() -> None:
    assert watched(convergence, 200) == []


def test_the_same_falls_without_the_success_are_one() -> None:
    """What excuses the falls above is the success and nothing else."""
    flat = watched(lambda step: convergence(step) | {"success": 0.3}, 200)
    assert {signal.name for warning in flat for signal in warning.signals} >= {"return_std_within", "learner/entropy"}
    unknown = watched(lambda step: {k: v for k, v in convergence(step).items() if k != "success"}, 200)
    assert unknown and unknown[0].success_now is None and "while success" not in unknown[0].text


def test_slow_but_steady_learning_with_falling_entropy_is_no_collapse() -> None:
    def trace(step: int) -> Metrics:
        return {"success": 0.1 + 0.0015 * step, "learner/entropy": 1.0 if step < 30 else 0.2}

    assert watched(trace, 400) == []
    stalled = watched(lambda step: trace(min(step, 200)), 400)
    assert len(stalled) == 1 and 200 <= stalled[0].step <= 225
    assert stalled[0].since == 30


@given(seed=st.integers(0, 10**6), size=st.floats(0, 0.2))
@settings(max_examples=30, deadline=None)
def test_noise_is_no_collapse(seed: int, size: float) -> None:
    level = {
        "success": 0.4,
        "return_std_within": 0.3,
        "learner/entropy": 0.8,
        "learner/grad_norm": 1.0,
        "repeated_actions_share": 0.1,
        "distinct_first_actions": 4.0,
    }
    assert watched(lambda step: shaken(level, step, size, seed), 120) == []


@given(
    st.dictionaries(
        st.sampled_from(["success", *(signal.name for signal in SIGNALS)]),
        st.one_of(st.floats(0, 1e6), st.just(math.nan), st.none()),
    )
)
@settings(deadline=None)
def test_constant_traces_never_warn(metrics: dict[str, Any]) -> None:
    assert watched(lambda step: metrics, 40) == []


def test_a_dip_shorter_than_the_patience_is_none_and_a_recovered_signal_is_warned_of_again() -> None:
    def dips(*spans: range) -> Callable[[int], Metrics]:
        return lambda step: {"success": 0.3, "learner/entropy": 0.05 if any(step in s for s in spans) else 1.0}

    assert watched(dips(range(20, 24), range(30, 34)), 60) == []
    warnings = watched(dips(range(20, 30), range(40, 50)), 60)
    assert [(w.step, w.since) for w in warnings] == [(24, 20), (44, 40)]


def test_what_began_at_nothing_has_nothing_to_fall_from() -> None:
    def nothing(step: int) -> Metrics:
        return {"success": 0.0, "return_std_within": 0.0, "distinct_first_actions": 1.0, "learner/entropy": 0.0}

    assert watched(nothing, 50) == []


def test_resumed_from_metrics_it_is_the_same_watch() -> None:
    lines, watch, warnings = [], CollapseWatch(), []
    for step in range(1, 101):
        metrics: dict[str, Any] = echo_trap(step)
        if step % 9 == 0:
            metrics["learner/entropy"] = None  # what metrics.jsonl writes for NaN
        lines.append({"step": step, "phase": "train", "time": 1.0, **metrics})
        lines.append({"step": step, "phase": "evaluation", "time": 1.0, "success": 0.0, "learner/entropy": 0.0})
        warnings.append(watch.feed(step, metrics))
    for stop in (0, 3, 57, 100):
        resumed = CollapseWatch.replay(lines[: 2 * stop])
        again = [resumed.feed(line["step"], line) for line in lines[2 * stop :: 2]]
        assert again == warnings[stop:]
        assert resumed == watch


def trajectory(*texts: str, status: Any = "done") -> Trajectory:
    one = np.array([1], np.int32)
    steps = tuple(Step(one, one, np.zeros(1, np.float32), one, Action(text, raw=text)) for text in texts)
    return Trajectory(Task("t", "p"), 0, steps, status, "answer")


def test_repeated_actions_share() -> None:
    failed = trajectory("x", "x", "x", status="failed")
    group = Group(Task("t", "p"), (trajectory("a", "b", "a", "a"), trajectory("a", "c"), failed))
    assert repeated_actions_share([group]) == pytest.approx(2 / 6)
    assert repeated_actions_share([]) == 0.0
    assert repeated_actions_share([Group(Task("t", "p"), (failed,))]) == 0.0


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), min_size=1, max_size=4))
def test_repeats_are_within_a_trajectory_and_never_its_first_action(texts: list[list[str]]) -> None:
    group = Group(Task("t", "p"), tuple(trajectory(*row) for row in texts))
    share = repeated_actions_share([group])
    assert 0 <= share < 1
    assert (share == 0) == all(len(set(row)) == len(row) for row in texts)
    assert share == repeated_actions_share([Group(Task("t", "p"), tuple(reversed(group.trajectories)))])
