"""Credit assignment: from the returns of groups to one advantage for each sampled token.

A recipe names an estimator by its registered name, or `module.path:Name`: a function of the estimator's options that
returns the `Estimator`. A selection (`selection.py`) says which groups are learned from at all.
"""

from __future__ import annotations

from renma.credit.base import Credit, Estimator, Evidence, credit, group_signal, usable_groups
from renma.registry import Registry

ESTIMATORS = Registry(
    "advantage estimator",
    {
        "reinforce": "renma.credit.returns:reinforce",
        "reinforce_pp": "renma.credit.returns:reinforce_pp",
        "remax": "renma.credit.returns:remax",
        "rloo": "renma.credit.group_relative:rloo",
        "grpo": "renma.credit.group_relative:grpo",
        "dr_grpo": "renma.credit.group_relative:dr_grpo",
        "per_component": "renma.credit.group_relative:per_component",
        "turn_level": "renma.credit.turn_level:turn_level",
        "gigpo": "renma.credit.anchor:gigpo",
        "gae_token": "renma.credit.gae:gae_token",
        "gae_step": "renma.credit.gae:gae_step",
        "distillation": "renma.credit.distillation:distillation",
        "pairs": "renma.credit.preferences:pairs",
        "best": "renma.credit.imitation:best",
        "ones": "renma.credit.imitation:ones",
    },
)

SELECTIONS = Registry(
    "selection of groups",
    {
        "starpo_s": "renma.credit.selection:starpo_s",
        "mixed": "renma.credit.selection:mixed",
    },
)

__all__ = [
    "ESTIMATORS",
    "SELECTIONS",
    "Credit",
    "Estimator",
    "Evidence",
    "credit",
    "group_signal",
    "usable_groups",
]
