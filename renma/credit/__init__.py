"""Credit assignment: from the returns of groups to one advantage for each sampled token.

A recipe names an estimator by its registered name, or `module.path:Name`: a function of the estimator's options that
returns the `Estimator`.
"""

from __future__ import annotations

from renma.credit.base import Estimator, group_signal, usable_groups
from renma.registry import Registry

ESTIMATORS = Registry(
    "advantage estimator",
    {
        "reinforce": "renma.credit.returns:reinforce",
        "rloo": "renma.credit.group_relative:rloo",
        "grpo": "renma.credit.group_relative:grpo",
        "dr_grpo": "renma.credit.group_relative:dr_grpo",
        "per_component": "renma.credit.group_relative:per_component",
    },
)

__all__ = ["ESTIMATORS", "Estimator", "group_signal", "usable_groups"]
