"""Learning: rows of tokens with advantages in, new weights and statistics out. Knows no environment, no algorithm."""

from __future__ import annotations

from renma.registry import Registry

LOSSES = Registry(
    "loss",
    {
        "reinforce": "renma.learning.losses:reinforce",
        "ppo_clip": "renma.learning.losses:ppo_clip",
        "gspo": "renma.learning.losses:gspo",
        "step_ratio": "renma.learning.losses:step_ratio",
        "cispo": "renma.learning.losses:cispo",
        "decoupled": "renma.learning.losses:decoupled",
        "dpo": "renma.learning.losses:dpo",
        "sft": "renma.learning.losses:sft",
        "hybrid": "renma.learning.losses:hybrid",
    },
)

CORRECTIONS = Registry(
    "correction",
    {
        "token_tis": "renma.learning.correction:token_tis",
        "sequence_tis": "renma.learning.correction:sequence_tis",
        "token_mask": "renma.learning.correction:token_mask",
        "sequence_mis": "renma.learning.correction:sequence_mis",
        "geometric_rejection": "renma.learning.correction:geometric_rejection",
        "k3_rejection": "renma.learning.correction:k3_rejection",
    },
)

__all__ = ["CORRECTIONS", "LOSSES"]
