"""Every algorithm on one screen: advantage estimator x policy loss x aggregation, and how a batch comes about.

A recipe names a preset and may replace any part of it:

    algorithm: {preset: grpo, advantage: {type: rloo}, aggregate: token_mean}

A preset of your own is `module.path:Name`, an `Algorithm` or a function without arguments that makes one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from renma.credit import ESTIMATORS, SELECTIONS
from renma.credit.selection import Selection
from renma.errors import RecipeError
from renma.learning import CORRECTIONS, LOSSES
from renma.learning.aggregate import Aggregate
from renma.learning.correction import Correction
from renma.learning.losses import PolicyLoss, traits
from renma.learning.objective import OldLogprobs
from renma.parts import build
from renma.recipe import AlgorithmSection
from renma.registry import Registry

LearnsFrom = Literal["samples", "demonstrations", "samples_and_demonstrations", "preferences"]
KlForm = Literal["k2", "k3_ratio", "k1_reward"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How experience becomes an update.

    advantage: groups -> an advantage per sampled token. loss: per-token policy loss. aggregate: token losses -> one.
    learns_from: groups that the policy sampled, demonstrations, both in one update, or recorded preference pairs.
    old_logprobs: the policy whose ratio is clipped: `behaviour` as recorded when sampling, `recompute` the learner's
    own at the start of the update, `on_policy` the current one (ratio exactly 1: one update per batch only).
    correction: weights for a sampler that disagrees with the learner. kl: coefficient of the pull to the starting
    policy, kl_form: as a loss term or in the reward. entropy: coefficient of the entropy bonus. 0 is off.
    select: which groups are learned from. refills: how often fresh tasks replace those that it left out.
    task_normalisation: advantages standardised within each task family. mask_truncated: trajectories cut by a limit
    count in the statistics but get no loss. skip_zero: trajectories without advantage get no loss and are in no
    normaliser. source: where the composition comes from, and where it departs from that.
    """

    name: str
    advantage: Any
    loss: PolicyLoss
    aggregate: Aggregate = "token_mean"
    learns_from: LearnsFrom = "samples"
    old_logprobs: OldLogprobs = "behaviour"
    correction: Correction | None = None
    kl: float = 0.0
    kl_form: KlForm = "k2"
    entropy: float = 0.0
    select: Selection | None = None
    refills: int = 0
    task_normalisation: bool = False
    mask_truncated: bool = False
    skip_zero: bool = False
    source: str = ""

    @property
    def min_group_size(self) -> int:
        """The fewest members of a group that the estimator can compare (1 when it does not say)."""
        return int(getattr(self.advantage, "min_group_size", 1))

    @property
    def needs(self) -> tuple[str, ...]:
        """What the advantage needs besides the groups: values (a critic), greedy, teacher."""
        return tuple(getattr(self.advantage, "needs", ()))

    @property
    def needs_reference(self) -> bool:
        """Whether the starting policy is kept beside the trained one."""
        return bool(self.kl) or traits(self.loss).needs_reference


def table() -> dict[str, Callable[[], Algorithm]]:
    """Name -> what makes the preset. Parts are looked up when a preset is asked for."""

    def of(name: str, advantage: tuple, loss: tuple, aggregate: Aggregate, source: str, **rest: Any) -> Algorithm:
        def part(registry: Registry, named: tuple) -> Any:
            return registry[named[0]](**(named[1] if len(named) > 1 else {}))

        if "select" in rest:
            rest["select"] = part(SELECTIONS, rest["select"])
        return Algorithm(name, part(ESTIMATORS, advantage), part(LOSSES, loss), aggregate, source=source, **rest)

    clip, clip_higher = ("ppo_clip", {"low": 0.8, "high": 1.2}), ("ppo_clip", {"low": 0.8, "high": 1.28})
    both, dpo = {"learns_from": "samples_and_demonstrations"}, ("dpo", {"beta": 0.1})
    # fmt: off
    rows: tuple[tuple[Any, ...], ...] = (
        # name, advantage, loss, aggregate, source, the rest
        ("reinforce", ("reinforce",), ("reinforce",), "constant", "Williams 1992; baseline: batch_mean, running_mean"),
        ("reinforce_pp", ("reinforce_pp",), clip, "token_mean", "Hu 2025 (REINFORCE++); the KL in the reward is off"),
        ("reinforce_pp_baseline", ("reinforce_pp", {"baseline": "group_mean"}), clip, "token_mean", "Hu 2025"),
        ("rloo", ("rloo",), ("reinforce",), "constant", "Ahmadian et al. 2024 (Back to basics), eq. 8; KL off"),
        ("remax", ("remax",), ("reinforce",), "constant", "Li et al. 2023 (ReMax), algorithm 1"),
        ("ppo", ("gae_token",), clip, "token_mean", "Schulman et al. 2017; Ouyang et al. 2022, GAE over tokens"),
        ("steppo", ("gae_step",), ("step_ratio", {"low": 0.95, "high": 1.05}), "step_mean", "StepPO, GAE over steps"),
        ("grpo", ("grpo",), clip, "sequence_mean", "Shao et al. 2024 (DeepSeekMath), eq. 3; the KL penalty is off"),
        ("grpo_mean", ("grpo", {"std": False}), clip, "token_mean", "grpo without std, over all tokens alike"),
        ("dr_grpo", ("dr_grpo",), clip, "constant", "Liu et al. 2025 (Understanding R1-Zero), section 3.2"),
        ("dapo", ("grpo",), clip_higher, "token_mean", "Yu et al. 2025 (DAPO); its penalty is the reward `overlong`",
         {"select": ("mixed",), "refills": 3}),
        ("gspo", ("grpo",), ("gspo",), "sequence_mean", "Zheng et al. 2025 (GSPO), eq. 14-15 (token form)"),
        ("cispo", ("grpo",), ("cispo",), "token_mean", "MiniMax 2025 (M1), eq. 4-5"),
        ("gigpo", ("gigpo",), clip, "sequence_mean", "Feng et al. 2025 (GiGPO), eq. 7-9; mean only"),
        ("starpo_s", ("grpo",), clip_higher, "token_mean", "Wang et al. 2025 (RAGEN), sec. 4.2, without the critic",
         {"select": ("starpo_s", {"keep": 0.5})}),
        ("decoupled_ppo", ("grpo",), ("decoupled",), "token_mean", "Fu et al. 2025 (AReaL), eq. 5; group baseline",
         {"old_logprobs": "recompute"}),
        ("on_policy", ("dr_grpo",), clip, "token_mean", "the policy gradient itself: ratio 1, one update a batch",
         {"old_logprobs": "on_policy"}),
        ("sft", ("ones",), ("sft",), "token_mean", "likelihood of what was shown", {"learns_from": "demonstrations"}),
        ("rft", ("best",), ("sft",), "token_mean", "Yuan et al. 2023 (RFT): log-likelihood of what succeeded",
         {"skip_zero": True}),
        ("sft_rl", ("grpo",), ("hybrid",), "sequence_mean", "grpo and sft in one update, a demonstration a task", both),
        ("dpo", ("pairs",), dpo, "constant", "Rafailov et al. 2023, eq. 7: best and worst", {"skip_zero": True}),
        ("multi_turn_dpo", ("pairs",), dpo, "constant", "Xiong et al. 2024: dpo, log-probabilities over all actions",
         {"skip_zero": True}),
        ("step_dpo", ("pairs", {"from_divergence": True}), dpo, "constant", "Lai et al. 2024: from the step they part",
         {"skip_zero": True}),
        ("distillation", ("distillation",), ("reinforce", {"importance": True}), "token_mean",
         "Agarwal et al. 2024; reverse KL to `teacher` on the student's own samples"),
    )
    # fmt: on
    return {row[0]: partial(of, *row[:5], **dict(row[5] if len(row) > 5 else {})) for row in rows}


PRESETS = Registry("algorithm preset", dict(table()))


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


VALUES = (
    "aggregate", "learns_from", "old_logprobs", "kl", "kl_form", "entropy", "refills", "task_normalisation",
    "mask_truncated", "skip_zero",
)  # fmt: skip
PARTS = {"advantage": ESTIMATORS, "loss": LOSSES, "correction": CORRECTIONS, "select": SELECTIONS}


def resolve(section: AlgorithmSection) -> Algorithm:
    """The preset with every part that the recipe names put in its place. Raises RecipeError naming the key.

    `correction: {type: none}` and `select: {type: none}` take the preset's away.
    """
    changes: dict[str, Any] = {key: value for key in VALUES if (value := getattr(section, key)) is not None}
    for key, registry in PARTS.items():
        named = getattr(section, key)
        if named is not None:
            off = named.type == "none" and key in ("correction", "select")
            changes[key] = None if off else build(registry, named, f"algorithm.{key}")
    return replace(preset(section.preset), **changes)
