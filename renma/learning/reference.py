"""The reference policy of a KL penalty: a frozen copy of the policy as reinforcement learning began."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from renma.learning.forward import TreeModel
from renma.learning.rows import Row
from renma.types import Floats


class Reference:
    """Gives log pi_ref at every sampled token. Costs a second copy of the weights and one forward pass a step.

    output_ids, temperature: as the learner's, so that both log-probabilities mean the same.
    """

    def __init__(
        self,
        model: Any,
        *,
        output_ids: torch.Tensor | None = None,
        temperature: float = 1.0,
        max_positions: int = 4096,
        logit_chunk: int = 256,
    ) -> None:
        self._tree = TreeModel(
            model.eval().requires_grad_(False), output_ids=output_ids, temperature=temperature, logit_chunk=logit_chunk
        )
        self._max_positions = max_positions

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row]) -> list[Floats]:
        """One float32 array per row, over its trained positions."""
        sizes = [int(np.count_nonzero(row.trained)) for row in rows]
        result = np.zeros(sum(sizes), np.float32)
        self._tree.begin()
        for pack in self._tree.packs(list(rows), self._max_positions):
            result[pack.token] = self._tree.logprobs(pack)[0].float().cpu().numpy()
        self._tree.finish()
        return np.split(result, np.cumsum(sizes)[:-1]) if sizes else []
