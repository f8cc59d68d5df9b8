"""Policy losses: what each sampled token is charged. How the charges are added up is aggregate.py's.

A loss is a function of `LossInput` that returns the loss [n] of each token and its statistics; `Traits` lists what it
may say of itself. All bounds are bounds on the ratio itself. dapo is `ppo_clip` with bounds 0.8 and 1.28.
"""

from __future__ import annotations

from renma.learning.losses.base import (
    LossInput,
    PolicyLoss,
    StepTokens,
    Traits,
    having,
    log_ratio,
    scales_with_advantage,
    traits,
    weighed,
)
from renma.learning.losses.kl import KlForm, k1, k2, k3, k3_ratio
from renma.learning.losses.preference import dpo
from renma.learning.losses.sequence import gspo, sequence_ratio, step_ratio
from renma.learning.losses.token import cispo, decoupled, hybrid, ppo_clip, reinforce, sft

__all__ = [
    "KlForm",
    "LossInput",
    "PolicyLoss",
    "StepTokens",
    "Traits",
    "having",
    "log_ratio",
    "scales_with_advantage",
    "traits",
    "weighed",
    "k1",
    "k2",
    "k3",
    "k3_ratio",
    "reinforce",
    "ppo_clip",
    "decoupled",
    "cispo",
    "sft",
    "hybrid",
    "sequence_ratio",
    "gspo",
    "step_ratio",
    "dpo",
]
