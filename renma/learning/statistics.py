"""What an update reports: numbers gathered over packs and optimiser steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from renma.learning.correction import CLAMP, Corrected

OnProgress = Callable[[int, int], None]


@dataclass(slots=True)
class Mismatch:
    """Where sampler and learner disagree, over tokens gathered in parts: sums of Delta = log pi_old - log mu."""

    tokens: int = 0
    plain: float = 0.0
    absolute: float = 0.0
    largest: float = 0.0
    divergence: float = 0.0
    ratio: float = 0.0
    squared: float = 0.0
    outside: int = 0
    clipped: int = 0
    rejected: int = 0

    def add(self, delta: NDArray[Any], corrected: Corrected | None = None) -> None:
        """delta [n], held within +-20; NaN where nothing was recorded: such tokens are in no number."""
        known = np.isfinite(delta)
        held = np.clip(delta[known].astype(np.float64), -CLAMP, CLAMP)
        if not len(held):
            return
        ratio, size = np.exp(held), np.abs(held)
        self.tokens += len(held)
        self.plain += float(held.sum())
        self.absolute += float(size.sum())
        self.largest = max(self.largest, float(size.max()))
        self.divergence += float((np.expm1(held) - held).sum())
        self.ratio += float(ratio.sum())
        self.squared += float(ratio @ ratio)
        self.outside += int(np.count_nonzero((ratio < 0.5) | (ratio > 2.0)))
        if corrected is not None:
            self.clipped += int(np.count_nonzero(corrected.clipped[known]))
            self.rejected += int(np.count_nonzero(~corrected.keep[known]))

    def result(self) -> dict[str, float]:
        """Empty where no token had a recorded log-probability."""
        n = self.tokens
        if not n:
            return {}
        return {
            "mismatch_mean": self.absolute / n,
            "mismatch_max": self.largest,
            "kl_behaviour": self.divergence / n,
            "effective_sample_size": self.ratio**2 / (n * self.squared),
            "perplexity_ratio": float(np.exp(self.plain / n)),
            "mismatch_outside_share": self.outside / n,
            "correction_clip_share": self.clipped / n,
            "correction_reject_share": self.rejected / n,
        }


class UpdateStatistics:
    """Statistics gathered over packs and optimiser steps: weighted means, sums, maxima, last values."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)
        self.totals: dict[str, float] = defaultdict(float)
        self.maxima: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.mismatch = Mismatch()
        self.measures = True  # the mismatch is still to be added for the optimiser step at hand

    def add(self, name: str, value: float) -> None:
        self.totals[name] += value

    def mean(self, name: str, value: float, weight: float) -> None:
        self.sums[name] += value * weight
        self.counts[name] += weight

    def max(self, name: str, value: float) -> None:
        self.maxima[name] = max(self.maxima.get(name, -np.inf), value)

    def tokens(self, name: str, values: Tensor, weight: float = 1.0) -> None:
        """A statistic of each token [n]: its mean, or its maximum where the name ends in `_max`.

        weight: how many tokens each stands for.
        """
        values = values.detach()
        if name.endswith("_max"):
            self.max(name, float(values.max()))
        else:
            self.mean(name, float(values.mean()), len(values) * weight)

    def result(self) -> dict[str, float]:
        means = {name: value / self.counts[name] for name, value in self.sums.items()}
        return means | dict(self.totals) | self.maxima | self.last | self.mismatch.result()


class Progress:
    """Reports how many of an update's tokens are done, over all its passes."""

    def __init__(self, report: OnProgress | None, total: int) -> None:
        self.report, self.total, self.done = report, total, 0

    def advance(self, tokens: int) -> None:
        self.done += tokens
        if self.report is not None:
            self.report(self.done, self.total)
