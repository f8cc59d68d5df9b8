"""The smallest real recipe: every stage, in seconds."""

from __future__ import annotations

from typing import Any

from renma.types import Trajectory


def variety(trajectory: Trajectory) -> float:
    """A reward that even an untrained policy can earn more or less of: how many different tokens it writes."""
    return len({int(i) for step in trajectory.steps for i in step.action_ids}) / 16


TINY: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "model": {"type": "scratch", "layers": 1, "hidden": 32, "heads": 2, "feed_forward": 64, "context": 128},
    "tasks": {"type": "arithmetic", "size": 64, "seed": 1, "max_terms": 3, "max_digits": 1},
    "environment": {"type": "calculator", "max_operations": 1, "max_turns": 4},
    "sampling": {"max_tokens": 16},
    "rewards": [{"type": "tests.end_to_end.tiny:variety"}],
    "rollout": {"tasks_per_step": 4, "group_size": 4, "slots": 8},
    "learner": {"learning_rate": 1e-3},
    "cold_start": {
        "demonstrator": {"type": "arithmetic"},
        "demonstrations": 64,
        "batch": 16,
        "learner": {"learning_rate": 3e-3},
    },
    "evaluation": {
        "sets": [{"name": "held-out", "source": {"type": "arithmetic", "size": 8, "seed": 9, "max_digits": 1}}],
        "every": 3,
    },
    "training": {"steps": 6, "checkpoint_every": 2},
}
