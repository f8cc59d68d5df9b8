"""Measuring a policy on a set of tasks: success with a 95 % interval over tasks, pass@k where there are more tries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from renma.evaluation.statistics import bootstrap_interval, pass_at_k, wilson_interval
from renma.rollout.runner import Runner
from renma.types import Group, Task, Trajectory


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """success: mean over tasks of the share of attempts that succeed; low, high: its 95 % interval.

    successes [n tasks]: how many of a task's k attempts succeeded. An attempt that failed for reasons of
    infrastructure is not counted as an attempt; a task with none left is left out and counted in `lost`.
    """

    name: str
    success: float
    low: float
    high: float
    n: int
    k: int
    pass_at_k: float
    turns: float
    tokens: float
    stop_reasons: dict[str, int] = field(default_factory=dict)
    successes: tuple[int, ...] = ()
    lost: int = 0
    groups: tuple[Group, ...] = ()

    def summary(self) -> dict[str, float | int | str]:
        """The numbers, for summary.json."""
        return {
            "success": self.success,
            "low": self.low,
            "high": self.high,
            "n": self.n,
            "k": self.k,
            "pass_at_k": self.pass_at_k,
            "turns": self.turns,
            "tokens": self.tokens,
        }

    def metrics(self) -> dict[str, float]:
        """The numbers, under `evaluation/<set>/`, for metrics.jsonl."""
        prefix = f"evaluation/{self.name}"
        return {f"{prefix}/{key}": float(value) for key, value in self.summary().items() if not isinstance(value, str)}


async def evaluate(
    runner: Runner,
    tasks: Sequence[Task],
    *,
    name: str,
    k: int = 1,
    done: Callable[[Trajectory], None] | None = None,
) -> EvaluationResult:
    """Run k attempts at each task. Seeds depend on the set's name and the task, never on the training step, so that two
    checkpoints meet the same draws (a paired comparison)."""
    groups = await runner.groups(tasks, k, purpose=f"evaluation/{name}", done=done)
    return summarise(name, groups, k)


def summarise(name: str, groups: Sequence[Group], k: int) -> EvaluationResult:
    counted = [(group, [t for t in group.trajectories if t.status != "failed"]) for group in groups]
    kept = [(group, members) for group, members in counted if members]
    shares = np.array([np.mean([t.solved for t in members]) for _, members in kept])
    wins = [sum(t.solved for t in members) for _, members in kept]
    trajectories = [t for _, members in kept for t in members]
    if not kept:
        low = high = success = at_k = float("nan")
    else:
        success = float(shares.mean())
        low, high = wilson_interval(sum(wins), len(wins)) if k == 1 else bootstrap_interval(shares)
        at_k = float(
            np.mean(
                [
                    pass_at_k(len(members), win, min(k, len(members)))
                    for (_, members), win in zip(kept, wins, strict=True)
                ]
            )
        )
    return EvaluationResult(
        name=name,
        success=success,
        low=float(low),
        high=float(high),
        n=len(kept),
        k=k,
        pass_at_k=at_k,
        turns=float(np.mean([len(t.steps) for t in trajectories])) if trajectories else 0.0,
        tokens=float(np.mean([t.sampled_tokens for t in trajectories])) if trajectories else 0.0,
        stop_reasons=dict(Counter(t.stop_reason for group in groups for t in group.trajectories)),
        successes=tuple(wins),
        lost=len(counted) - len(kept),
        groups=tuple(groups),
    )
