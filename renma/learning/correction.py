"""Importance weights for a sampler that disagrees with the learner: exp(log pi_old - log mu), truncated, detached."""

from __future__ import annotations

import torch
from torch import Tensor

CLAMP = 20.0  # |log ratio| beyond this is held there, so that exp stays finite


def token_weights(old: Tensor, behaviour: Tensor, cap: float = 2.0) -> Tensor:
    """min(exp(old - behaviour), cap) for each token, detached [n] (truncated importance sampling)."""
    return (old - behaviour).detach().clamp(-CLAMP, CLAMP).exp().clamp(max=cap)


def sequence_weights(old: Tensor, behaviour: Tensor, sequence: Tensor, cap: float = 2.0) -> Tensor:
    """min(exp(sum over the sequence of old - behaviour), cap), given to each of its tokens, detached [n].

    sequence [n]: the sequence each token belongs to (any integers).
    """
    difference = (old - behaviour).detach()
    _, unit = torch.unique(sequence, return_inverse=True)
    sums = torch.zeros(int(unit.max()) + 1 if len(unit) else 0, dtype=difference.dtype, device=difference.device)
    sums.index_add_(0, unit, difference)
    return sums.clamp(-CLAMP, CLAMP).exp().clamp(max=cap)[unit]
