"""The check at the start of a run and of a resume: do sampler and learner mean the same log-probabilities?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from renma.errors import RunError
from renma.learning.learner import Learner
from renma.learning.rows import Row
from renma.recipe import Recipe

TOLERANCE = 0.05  # nats: bfloat16 stays well under it, another temperature or other weights do not
INT8_TOLERANCE = 0.3  # 8-bit weights are another policy by design: about 0.1 (benchmarks/precision.py)
CHECKED_ROWS = 32  # enough to see a difference; the check costs one forward pass over them


def samples_with_int8(recipe: Recipe) -> bool:
    """Whether the engine samples with 8-bit copies of the learner's weights."""
    engine = recipe.rollout.engine
    return engine.type == "local" and engine.options.get("weights") == "int8"


def mismatch_tolerance(recipe: Recipe) -> float:
    """The recipe's own, or what its engine can be expected to keep."""
    given = recipe.training.mismatch_tolerance
    if given is not None:
        return given
    return INT8_TOLERANCE if samples_with_int8(recipe) else TOLERANCE


def check_mismatch(learner: Learner, rows: Sequence[Row], tolerance: float) -> float:
    """The mean |log pi_learner - log pi_engine| over the first rows' sampled tokens.

    Raises RunError when it exceeds `tolerance` or is not a number: training on it would push the wrong way, silently.
    """
    part = list(rows[:CHECKED_ROWS])
    learned = np.concatenate(learner.logprobs(part))
    sampled = np.concatenate([row.logprobs[row.trained] for row in part])
    gap = np.abs(learned.astype(np.float64) - sampled.astype(np.float64))
    mean = float(gap.mean())
    if not mean <= tolerance:
        raise RunError(
            f"the engine's log-probabilities differ from the learner's by {mean:.4g} on average (largest "
            f"{gap.max():.4g}, tolerance {tolerance:g}) on the first batch: check that both have the same weights, "
            "temperature and compute type, or raise training.mismatch_tolerance"
        )
    return mean
