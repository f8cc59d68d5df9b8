"""Every algorithm on one screen: a composition of an advantage estimator, a policy loss and an aggregation.

A recipe names a preset and may replace any part of it:

    algorithm: {preset: grpo, advantage: {type: rloo}, aggregate: token_mean}

A preset of your own is `module.path:Name`, an `Algorithm` or a function without arguments that makes one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from renma.credit import ESTIMATORS, Estimator
from renma.credit.group_relative import dr_grpo, grpo, rloo
from renma.credit.returns import reinforce
from renma.errors import RecipeError
from renma.learning import LOSSES, losses
from renma.learning.aggregate import Aggregate
from renma.learning.losses import PolicyLoss
from renma.parts import build
from renma.recipe import AlgorithmSection
from renma.registry import Registry

OldLogprobs = Literal["behaviour", "recompute", "on_policy"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How returns become an update.

    advantage: groups -> an advantage per sampled token. loss: per-token policy loss. aggregate: token losses -> one.
    old_logprobs: the policy whose ratio is clipped: `behaviour` as recorded when sampling, `recompute` the learner's
    own at the start of the update, `on_policy` the current one (ratio exactly 1: one update per batch only).
    kl, entropy: coefficients of the k2 penalty to the starting policy and of the entropy bonus; 0 is off.
    mask_truncated: trajectories cut by a limit count in the statistics but get no loss.
    source: where the composition comes from, and where it departs from that.
    """

    name: str
    advantage: Estimator
    loss: PolicyLoss
    aggregate: Aggregate = "token_mean"
    old_logprobs: OldLogprobs = "behaviour"
    kl: float = 0.0
    entropy: float = 0.0
    mask_truncated: bool = False
    source: str = ""

    @property
    def min_group_size(self) -> int:
        """The fewest members of a group that the estimator can compare (1 when it does not say)."""
        return int(getattr(self.advantage, "min_group_size", 1))


TABLE: tuple[Callable[[], Algorithm], ...] = (
    lambda: Algorithm(
        "grpo", grpo(), losses.ppo_clip(0.8, 1.2), "sequence_mean",
        source="Shao et al. 2024 (DeepSeekMath), eq. 3; the KL penalty is off",
    ),
    lambda: Algorithm(
        "grpo_mean", grpo(std=False), losses.ppo_clip(0.8, 1.2), "token_mean",
        source="grpo without the std, over all tokens alike: Liu et al. 2025 and Yu et al. 2025 (DAPO), section 3.3",
    ),
    lambda: Algorithm(
        "dr_grpo", dr_grpo(), losses.ppo_clip(0.8, 1.2), "constant",
        source="Liu et al. 2025 (Understanding R1-Zero-like training), section 3.2",
    ),
    lambda: Algorithm(
        "rloo", rloo(), losses.reinforce(), "constant",
        source="Ahmadian et al. 2024 (Back to basics), eq. 8; the KL in the reward is off",
    ),
    lambda: Algorithm(
        "reinforce", reinforce(), losses.reinforce(), "constant",
        source="Williams 1992; {advantage: {type: reinforce, baseline: batch_mean}} takes the mean off",
    ),
)  # fmt: skip

PRESETS = Registry("algorithm preset", {make().name: make for make in TABLE})


def preset(name: str) -> Algorithm:
    """A preset by its name in the table or as `module.path:Name`. Raises RecipeError when it is none."""
    try:
        found: Any = PRESETS[name]
    except RecipeError as error:
        raise RecipeError(f"algorithm.preset: {error}") from None
    made = found() if callable(found) else found
    if not isinstance(made, Algorithm):
        raise RecipeError(
            f"algorithm.preset: {name!r} gives a {type(made).__name__}; it must be an Algorithm, "
            "or a function without arguments that returns one"
        )
    return made


def resolve(section: AlgorithmSection) -> Algorithm:
    """The preset with every part that the recipe names put in its place. Raises RecipeError naming the key."""
    changes: dict[str, Any] = {
        key: value
        for key in ("aggregate", "old_logprobs", "kl", "entropy", "mask_truncated")
        if (value := getattr(section, key)) is not None
    }
    if section.advantage is not None:
        changes["advantage"] = build(ESTIMATORS, section.advantage, "algorithm.advantage")
    if section.loss is not None:
        changes["loss"] = build(LOSSES, section.loss, "algorithm.loss")
    return replace(preset(section.preset), **changes)
