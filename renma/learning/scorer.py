"""Log-probabilities of rows under a model, without learning."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from renma.learning.forward import TreeModel
from renma.learning.rows import Row
from renma.types import Floats


class Scorer:
    """Gives log pi at every trained token, as the learner computes it: tree packs, dropout off.

    output_ids: sorted ids the policy can emit; log-probabilities are normalised over them; None: over all.
    temperature: what actions are sampled at. max_positions, logit_chunk: as in the recipe's learner section.
    Raises ModelError when the architecture cannot be run as a tree.
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
        self.model = model.eval()
        self.max_positions = max_positions
        self.tree = TreeModel(model, output_ids=output_ids, temperature=temperature, logit_chunk=logit_chunk)
        self.tree.check()

    def logprobs(self, rows: Sequence[Row]) -> list[Floats]:
        """log pi of each row's trained tokens, float32 [trained tokens] a row.

        Raises DataError for an id that is not in the vocabulary, or a trained one that is not among the output tokens.
        """
        self.model.eval()
        return self.tree.each_token(rows, self.max_positions, lambda pack: self.tree.logprobs(pack)[0])
