"""From the hidden state of the position to be sampled to its logits over the output tokens, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from renma.inference.local.int8 import Int8Weights

# From here on `(W @ h.T).T` is faster than `h @ W.T` for a small batch (measured: twice as fast at 262k x 640, MKL).
WIDE = 8192


class OutputHead:
    """The output embedding of a causal LM, restricted to `output_ids` where given.

    Weights are read in place; only the rows of `output_ids` are gathered, once for each version of the weights. A head
    that is not a plain linear layer (LoRA on it, a quantised one) is called as it is, then its columns are chosen.
    """

    def __init__(self, model: PreTrainedModel, output_ids: Tensor | None) -> None:
        config = model.config.get_text_config()
        head: object = model.get_output_embeddings()
        self.head = head if isinstance(head, nn.Module) else None
        self.output_ids = output_ids
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.divisor: float | None = getattr(config, "logits_scaling", None)
        self.multiplier: float | None = getattr(config, "logit_scale", None)
        self.int8: Int8Weights | None = None  # where it has the head's rows, they make the logits
        self._rows: tuple[Tensor, Tensor | None] | None = None

    def forget(self) -> None:
        """The weights have changed: gather the rows anew."""
        self._rows = None

    def choose(self, logits: Tensor) -> Tensor:
        """[n, V] of the model's own logits to float32 [n, V'] of the output tokens."""
        if self.output_ids is not None:
            logits = logits.index_select(1, self.output_ids)
        return logits.float()

    def __call__(self, hidden: Tensor) -> Tensor:
        """float32 [n, V'] from hidden states [n, H]. The tensor is the caller's to overwrite."""
        assert self.head is not None
        if self.int8 is not None and self.int8.has_head:
            logits = self.int8.logits(hidden)
        elif type(self.head) is nn.Linear:
            weight, bias = self._output_rows(self.head)
            logits = (weight @ hidden.T).T.contiguous() if len(weight) >= WIDE else hidden @ weight.T
            if bias is not None:
                logits = logits + bias
        else:
            logits = self.head(hidden)
            if self.output_ids is not None:
                logits = logits.index_select(1, self.output_ids)
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.multiplier is not None:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.float()

    def _output_rows(self, head: nn.Linear) -> tuple[Tensor, Tensor | None]:
        if self.output_ids is None:
            return head.weight, head.bias
        if self._rows is None:
            bias = None if head.bias is None else head.bias[self.output_ids]
            self._rows = head.weight[self.output_ids], bias
        return self._rows
