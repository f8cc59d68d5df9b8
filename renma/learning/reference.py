"""The reference policy of a KL penalty: a frozen copy of the policy as reinforcement learning began."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from renma.learning.learner import Learner
from renma.learning.rows import Row
from renma.learning.scorer import Scorer
from renma.types import Floats


@dataclass(slots=True)
class Reference:
    """Gives log pi_ref at every sampled token. Costs a second copy of the weights and one forward pass a step."""

    scorer: Scorer

    @classmethod
    def of(cls, learner: Learner) -> Reference:
        """The learner's policy as it is now."""
        model = copy.deepcopy(learner.model)
        model.requires_grad_(False)
        return cls(learner.like(model))

    def logprobs(self, rows: Sequence[Row]) -> list[Floats]:
        """One float32 array per row, over its trained positions."""
        return self.scorer.logprobs(rows)
