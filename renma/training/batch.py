"""From a batch of groups to what the learner takes, and the numbers that describe the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from renma.credit.base import Estimator, group_signal
from renma.evaluation.evaluate import succeeded
from renma.learning.rows import Row, rows_of
from renma.types import Floats, Group


@dataclass(frozen=True, slots=True)
class Batch:
    """groups: those that are learned from. advantages: for each group, for each of its trainable trajectories, float32
    [sampled tokens]. rows: in group order; `Row.trajectory` counts trajectories over the batch."""

    groups: tuple[Group, ...]
    advantages: list[list[Floats]]
    rows: list[Row]
    dropped: dict[str, int]


def make_batch(
    groups: Sequence[Group],
    estimator: Estimator,
    *,
    min_group: int,
    drop_groups_with: Sequence[str] = (),
    mask_truncated: bool = False,
) -> Batch:
    """Keep the groups that can be learned from, credit their trajectories, make the rows.

    A group with a member that stopped for one of `drop_groups_with` is dropped whole: what is left of it would be
    biased towards whatever did not fail. A group with fewer than `min_group` members left is dropped too; both are
    counted by reason.
    """
    kept: list[Group] = []
    dropped: Counter[str] = Counter()
    for group in groups:
        bad = next((t.stop_reason for t in group.trajectories if t.stop_reason in drop_groups_with), None)
        if bad is not None:
            dropped[bad] += 1
        elif len(group.trainable) < max(1, min_group):
            dropped["too_few_members"] += 1
        else:
            kept.append(group)
    advantages = estimator(kept)
    rows: list[Row] = []
    index = 0
    for number, (group, values) in enumerate(zip(kept, advantages, strict=True)):
        for trajectory, value in zip(group.trainable, values, strict=True):
            if not (mask_truncated and trajectory.status == "truncated"):
                rows.extend(rows_of(trajectory, index, value, group=number))
            index += 1
    return Batch(tuple(kept), advantages, rows, dict(dropped))


def describe_batch(groups: Sequence[Group], batch: Batch, version: int) -> dict[str, float]:
    """The batch's own metrics: success, returns, reward parts, lengths, endings, failures by kind, staleness."""
    everyone = [t for group in groups for t in group.trajectories]
    usable = [t for t in everyone if t.trainable]
    numbers: dict[str, float] = {"trajectories": float(len(everyone)), "groups": float(len(groups))}
    failed = Counter(str(t.stop_reason) for t in everyone if t.status == "failed")
    numbers |= {f"failed/{reason}": float(count) for reason, count in failed.items()}
    numbers |= {f"dropped_groups/{reason}": float(count) for reason, count in batch.dropped.items()}
    if not usable:
        return numbers
    returns = np.array([t.ret for t in usable], dtype=np.float64)
    parts: dict[str, list[float]] = {}
    for t in usable:
        sums: Counter[str] = Counter()
        for rewards in (t.rewards, *(step.reward for step in t.steps)):
            for name, value in rewards.items():
                sums[name] += value  # type: ignore[assignment]
        for name in sums:
            parts.setdefault(name, []).append(float(sums[name]))
    first_actions = [len({t.steps[0].action.raw for t in group.trainable}) for group in groups if group.trainable]
    numbers |= {
        "success": float(np.mean([succeeded(t) for t in usable])),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "turns": float(np.mean([len(t.steps) for t in usable])),
        "action_tokens": float(np.mean([t.sampled_tokens for t in usable])),
        "truncated_share": float(np.mean([t.status == "truncated" for t in usable])),
        "distinct_first_actions": float(np.mean(first_actions)),
        "staleness_mean": float(np.mean([version - t.oldest_version for t in usable])),
        "staleness_max": float(max(version - t.oldest_version for t in usable)),
    }
    for name, values in parts.items():
        numbers[f"reward/{name}"] = float(np.sum(values) / len(usable))
    return numbers | group_signal(batch.groups)
