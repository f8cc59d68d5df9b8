"""What an update reports: numbers gathered over packs and optimiser steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from renma.learning.correction import CLAMP

OnProgress = Callable[[int, int], None]


class UpdateStatistics:
    """Statistics gathered over packs and optimiser steps: weighted means, sums, maxima, last values."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)
        self.totals: dict[str, float] = defaultdict(float)
        self.maxima: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.first_pass = True

    def add(self, name: str, value: float) -> None:
        self.totals[name] += value

    def mean(self, name: str, value: float, weight: float) -> None:
        self.sums[name] += value * weight
        self.counts[name] += weight

    def max(self, name: str, value: float) -> None:
        self.maxima[name] = max(self.maxima.get(name, -np.inf), value)

    def tokens(self, name: str, values: Tensor) -> None:
        """A statistic of each token [n]: its mean, or its maximum where the name ends in `_max`."""
        values = values.detach()
        if name.endswith("_max"):
            self.max(name, float(values.max()))
        else:
            self.mean(name, float(values.mean()), len(values))

    def mismatch(self, policy: Tensor, behaviour: Tensor) -> None:
        """log pi against the recorded log mu, where there are any: k3 of KL(mu||pi) and |log pi - log mu|."""
        known = torch.isfinite(behaviour)
        if not bool(known.any()):
            return
        difference = (policy - behaviour)[known].clamp(-CLAMP, CLAMP)
        self.mean("kl_behaviour", float((difference.exp() - 1 - difference).mean()), len(difference))
        self.mean("mismatch_mean", float(difference.abs().mean()), len(difference))
        self.max("mismatch_max", float(difference.abs().max()))

    def result(self) -> dict[str, float]:
        means = {name: value / self.counts[name] for name, value in self.sums.items()}
        return means | dict(self.totals) | self.maxima | self.last


class Progress:
    """Reports how many of an update's tokens are done, over all its passes."""

    def __init__(self, report: OnProgress | None, total: int) -> None:
        self.report, self.total, self.done = report, total, 0

    def advance(self, tokens: int) -> None:
        self.done += tokens
        if self.report is not None:
            self.report(self.done, self.total)
