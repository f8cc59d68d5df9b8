"""The engines that a recipe can name (`rollout.engine`), made from a policy."""

from __future__ import annotations

from typing import Literal

from torch import nn

from renma.inference.local import LocalEngine
from renma.models.policy import Policy
from renma.recipe import RolloutSection


def local_engine(
    policy: Policy, model: nn.Module, rollout: RolloutSection, weights: Literal["own", "int8"] = "own"
) -> LocalEngine:
    """In this process, with the learner's own weights: nothing is copied, nothing else is installed.

    weights: int8 samples with 8-bit copies of them instead (local/int8.py).
    """
    return LocalEngine(
        model,
        policy.tokenizer,
        output_ids=policy.output_ids,
        slots=rollout.slots,
        deterministic=rollout.deterministic,
        record_routing=rollout.record_routing,
        weights=weights,
    )
