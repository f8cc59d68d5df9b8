"""Learning: rows of tokens with advantages in, new weights and statistics out. Knows no environment, no algorithm."""

from __future__ import annotations

from renma.registry import Registry

LOSSES = Registry(
    "loss",
    {
        "reinforce": "renma.learning.losses:reinforce",
        "ppo_clip": "renma.learning.losses:ppo_clip",
        "sft": "renma.learning.losses:sft",
    },
)

__all__ = ["LOSSES"]
