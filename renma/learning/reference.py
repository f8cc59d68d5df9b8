"""The reference policy of a KL penalty: a frozen copy of the policy as reinforcement learning began."""

from __future__ import annotations

from torch import Tensor, nn

from renma.learning.scorer import Scorer


class Reference(Scorer):
    """Gives log pi_ref at every sampled token. Costs a second copy of the weights and one forward pass a step.

    The options are the learner's own, so that both log-probabilities mean the same.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        output_ids: Tensor | None = None,
        temperature: float = 1.0,
        max_positions: int = 4096,
        logit_chunk: int = 256,
    ) -> None:
        super().__init__(
            model.requires_grad_(False),
            output_ids=output_ids,
            temperature=temperature,
            max_positions=max_positions,
            logit_chunk=logit_chunk,
        )
