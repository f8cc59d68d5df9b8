"""Learning the usual way: each row computed whole, in padded batches of rows of about one length.

Only the sharing is missing: the head sees the positions that predict a trained token alone, in the learner's chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from renma.learning.learner import Learner
from renma.learning.logprobs import LogitRule, token_logprobs
from renma.learning.optimizer import apply_gradients
from renma.learning.rows import Row
from renma.learning.statistics import UpdateStatistics


def batches(rows: Sequence[Row], size: int) -> Iterator[list[Row]]:
    """Rows of about one length together, the longest first."""
    ordered = sorted(rows, key=len, reverse=True)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def padded_positions(rows: Sequence[Row], size: int) -> int:
    """Positions that are computed, the padding included; the last token of a row predicts nothing and is left out."""
    return sum(len(batch) * (len(batch[0]) - 1) for batch in batches(rows, size))


def padded_update(
    learner: Learner, rows: Sequence[Row], size: int, output_ids: torch.Tensor | None, temperature: float = 1.0
) -> dict[str, float]:
    """One optimiser step of -advantage * log pi, averaged over the trained tokens, `size` rows at a time.

    Returns loss and grad_norm, as `Learner.update` does with the same rows and the `reinforce` loss.
    """
    model: Any = learner.model
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = causal.config.get_text_config()
    rule = LogitRule(temperature, getattr(config, "final_logit_softcapping", None))
    inner, head = causal.get_decoder(), causal.get_output_embeddings().weight
    local = torch.arange(len(head))
    if output_ids is not None:
        local = torch.full((len(head),), -1)
        local[output_ids] = torch.arange(len(output_ids))
    count = sum(int(np.count_nonzero(row.trained)) for row in rows)
    model.eval()
    learner.optimizer.clear()
    numbers = UpdateStatistics()
    total = 0.0
    for batch in batches(rows, size):
        width = len(batch[0]) - 1
        ids, mask = torch.zeros(len(batch), width, dtype=torch.long), torch.zeros(len(batch), width, dtype=torch.long)
        for number, row in enumerate(batch):
            ids[number, : len(row) - 1] = torch.from_numpy(row.ids[:-1].astype(np.int64))
            mask[number, : len(row) - 1] = 1
        hidden = inner(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        which = np.concatenate([np.full(np.count_nonzero(row.trained), i) for i, row in enumerate(batch)])
        at = np.concatenate([np.flatnonzero(row.trained) for row in batch])
        predicting = hidden[torch.from_numpy(which), torch.from_numpy(at - 1)]
        targets = torch.from_numpy(np.concatenate([row.ids[row.trained] for row in batch]).astype(np.int64))
        weight = head if output_ids is None else head.index_select(0, output_ids)
        logp, _ = token_logprobs(predicting, weight, local[targets], rule=rule, chunk=learner.settings.logit_chunk)
        advantages = torch.from_numpy(np.concatenate([row.advantages[row.trained] for row in batch]))
        loss = -(advantages * logp).sum() / count
        loss.backward()
        total += float(loss.detach())
    apply_gradients([learner.optimizer], learner.settings, learner.settings.learning_rate, numbers)
    return {"loss": total, **numbers.result()}
