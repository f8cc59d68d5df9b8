"""The value of a state, read off a hidden state, and the loss that moves it towards its target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from renma.types import Floats

START = 0.01  # the first values' standard deviation, where the trunk ends in a normalisation


class ValueHead(nn.Module):
    """hidden [M, H] of any type -> V [M] in float32: linear, with a bias. At first V is close to 0 everywhere.

    seed: decides the first weights and nothing else.
    """

    def __init__(self, size: int, *, device: torch.device | None = None, seed: int = 0) -> None:
        super().__init__()
        first = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * (START / size**0.5)
        self.weight = nn.Parameter(first.to(device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)[..., 0]


def value_loss(value: Tensor, target: Tensor, old: Tensor, clip: float | None = None) -> tuple[Tensor, Tensor]:
    """0.5 (V - target)^2 [n], and where clipping took effect [n] bool.

    clip: the larger of that and the same for V kept within `clip` of `old`, so that a value that has already moved so
    far gains nothing by moving on (Schulman et al.'s PPO code; Engstrom et al. 2020, eq. 3). Inputs are [n].
    """
    plain = 0.5 * (value - target) ** 2
    if clip is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    moved = value - old
    kept = 0.5 * (old + moved.clamp(-clip, clip) - target) ** 2
    # Within the bounds `kept` is `plain` but for rounding.
    clipped = (moved.abs() > clip) & (kept > plain)
    return torch.where(clipped, kept, plain), clipped.detach()


def explained_variance(values: Floats, targets: Floats) -> float | None:
    """1 - Var(target - V) / Var(target) over [n]: 1 for a perfect critic, 0 for a constant one; None where all targets
    are equal, or a number is not finite."""
    target, value = np.asarray(targets, np.float64), np.asarray(values, np.float64)
    if len(target) < 2 or not np.isfinite(target + value).all() or np.ptp(target) == 0:
        return None
    return float(1 - np.var(target - value) / np.var(target))


class Auxiliary(Protocol):
    """A further loss on the hidden states that predict the trained tokens: the learner adds it to its objective.

    It has parameters and an optimiser of its own; through the hidden states it moves the policy too.
    """

    def begin(self, rows: Sequence[int]) -> None:
        """An optimiser step begins; its trained tokens are those of these rows of the batch, row after row."""
        ...

    def loss(self, hidden: Tensor, predictor: Tensor, index: NDArray[np.int64]) -> Tensor:
        """Its part of the objective, a number, over one pack. hidden [M, H]: of the nodes that predict something.
        predictor [n]: the node of each of the pack's tokens. index [n]: the token's place in the optimiser step."""
        ...

    def apply(self, done: float) -> None:
        """Every pack has been run backward: take its own optimiser step. done: the share of the batch before it."""
        ...
