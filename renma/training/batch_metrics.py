"""The numbers that describe a batch: success, returns, reward parts, lengths, endings, failures, staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from renma.credit import group_signal
from renma.profiling import timed
from renma.training.batch import Batch, Sampled
from renma.training.collapse import repeated_actions_share
from renma.types import Group


@timed("metrics")
def describe_batch(sampled: Sampled, batch: Batch, version: int) -> dict[str, float]:
    """The batch's own metrics, flat; a number that nothing can be computed from is left out, and so is what would say
    nothing of the policy: success, variety and age of what it did not sample."""
    groups = sampled.groups
    everyone = [t for group in groups for t in group.trajectories]
    usable = [t for t in everyone if t.trainable]
    numbers: dict[str, float] = {"trajectories": float(len(everyone)), "groups": float(len(groups))}
    if sampled.refills:
        numbers["refills"] = float(sampled.refills)
    failed = Counter(str(t.stop_reason) for t in everyone if t.status == "failed")
    numbers |= {f"failed/{reason}": float(count) for reason, count in failed.items()}
    numbers |= {f"dropped_groups/{reason}": float(count) for reason, count in batch.dropped.items()}
    if not usable:
        return numbers
    returns = np.array([t.ret for t in usable], dtype=np.float64)
    tokens = [t.sampled_tokens for t in usable]
    parts: dict[str, list[float]] = {}
    for t in usable:
        sums: Counter[str] = Counter()
        for rewards in (t.rewards, *(step.reward for step in t.steps)):
            for name, value in rewards.items():
                sums[name] += value  # type: ignore[assignment]
        for name in sums:
            parts.setdefault(name, []).append(float(sums[name]))
    numbers |= {
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "turns": float(np.mean([len(t.steps) for t in usable])),
        "action_tokens": float(np.mean(tokens)),
        "action_tokens_max": float(max(tokens)),
        "truncated_share": float(np.mean([t.status == "truncated" for t in usable])),
    }
    if not sampled.written:
        first = [len({t.steps[0].action.raw for t in group.trainable}) for group in groups if group.trainable]
        numbers |= {
            "success": float(np.mean([t.solved for t in usable])),
            "distinct_first_actions": float(np.mean(first)),
            "repeated_actions_share": repeated_actions_share(groups),
            "staleness_mean": float(np.mean([version - t.oldest_version for t in usable])),
            "staleness_max": float(max(version - t.oldest_version for t in usable)),
        }
    for name, values in parts.items():
        numbers[f"reward/{name}"] = float(np.sum(values) / len(usable))
    return numbers | group_signal(batch.groups) | {f"credit/{k}": v for k, v in batch.credit.metrics.items()}


def idle_workers(sampled: Sampled, concurrency: int) -> dict[str, float]:
    """seconds_workers_idle: how long a worker of the rollout had no episode, on average; what waits for the longest."""
    attempts = [t.seconds for group in sampled.groups for t in group.trajectories]
    workers = min(concurrency, len(attempts))
    if sampled.written or not workers:
        return {}
    return {"seconds_workers_idle": max(0.0, sampled.seconds - sum(attempts) / workers)}


def solve_rate(groups: Sequence[Group]) -> float:
    """The share of usable trajectories that solved their task; 0 when there are none."""
    usable = [t.solved for group in groups for t in group.trainable]
    return float(np.mean(usable)) if usable else 0.0
