"""The objective of one optimiser step written slowly, in plain Python floats, straight from the definitions.

`logp` are the log-probabilities that vary, `held` the same numbers where a definition stops the gradient: a difference
quotient over `logp` with `held` fixed is then the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Numbers = Sequence[float]


@dataclass(frozen=True)
class Token:
    trajectory: int
    step: int
    group: int
    advantage: float
    old: float
    behaviour: float
    reference: float


def clamp(value: float, low: float = -20.0, high: float = 20.0) -> float:
    return min(max(value, low), high)


def same(batch: Sequence[Token], level: str, i: int) -> list[int]:
    """The tokens of the unit that token i belongs to."""
    if level == "token":
        return [i]
    return [
        j
        for j, other in enumerate(batch)
        if other.trajectory == batch[i].trajectory and (level == "sequence" or other.step == batch[i].step)
    ]


# Losses


def ppo_term(advantage: float, ratio: float, low: float, high: float, dual: float | None = None) -> float:
    value = max(-advantage * ratio, -advantage * clamp(ratio, low, high))
    if dual is not None and advantage < 0:
        value = min(value, -advantage * dual)
    return value


def reinforce(
    logp: Numbers, held: Numbers, batch: Sequence[Token], importance: bool = False, cap: float = math.inf
) -> list[float]:
    weights = [
        min(math.exp(clamp(h - t.behaviour)), cap) if importance else 1.0 for h, t in zip(held, batch, strict=True)
    ]
    return [-w * t.advantage * x for w, t, x in zip(weights, batch, logp, strict=True)]


def ppo_clip(
    logp: Numbers,
    held: Numbers,
    batch: Sequence[Token],
    low: float = 0.8,
    high: float = 1.2,
    dual: float | None = None,
) -> list[float]:
    return [
        ppo_term(t.advantage, math.exp(clamp(x - t.old)), low, high, dual) for x, t in zip(logp, batch, strict=True)
    ]


def decoupled(
    logp: Numbers,
    held: Numbers,
    batch: Sequence[Token],
    low: float = 0.8,
    high: float = 1.2,
    cap: float = math.inf,
) -> list[float]:
    weights = [min(math.exp(clamp(t.old - t.behaviour)), cap) for t in batch]
    return [w * value for w, value in zip(weights, ppo_clip(logp, held, batch, low, high), strict=True)]


def cispo(logp: Numbers, held: Numbers, batch: Sequence[Token], low: float = 0.0, high: float = 4.0) -> list[float]:
    return [
        -clamp(math.exp(clamp(h - t.old)), low, high) * t.advantage * x
        for x, h, t in zip(logp, held, batch, strict=True)
    ]


def sequence_ratio(level: str) -> Callable[..., list[float]]:
    def charges(
        logp: Numbers, held: Numbers, batch: Sequence[Token], low: float = 1 - 3e-4, high: float = 1 + 4e-4
    ) -> list[float]:
        result = []
        for i, token in enumerate(batch):
            unit = same(batch, level, i)
            mean = sum(held[j] - batch[j].old for j in unit) / len(unit)
            ratio = math.exp(clamp(mean)) * math.exp(logp[i] - held[i])
            result.append(ppo_term(token.advantage, ratio, low, high))
        return result

    return charges


def sft(logp: Numbers, held: Numbers, batch: Sequence[Token]) -> list[float]:
    return [-x for x in logp]


def hybrid(logp: Numbers, held: Numbers, batch: Sequence[Token], imitation: float = 1.0) -> list[float]:
    on_samples = ppo_clip(logp, held, batch)
    return [
        -imitation * x if math.isnan(t.behaviour) else value
        for x, t, value in zip(logp, batch, on_samples, strict=True)
    ]


LOSSES: dict[str, Callable[..., list[float]]] = {
    "reinforce": reinforce,
    "ppo_clip": ppo_clip,
    "decoupled": decoupled,
    "cispo": cispo,
    "gspo": sequence_ratio("sequence"),
    "step_ratio": sequence_ratio("step"),
    "sft": sft,
    "hybrid": hybrid,
}


def dpo(logp: Numbers, batch: Sequence[Token], beta: float) -> tuple[float, list[float]]:
    """The mean of -log sigma(beta * Delta) over the groups with one chosen and one rejected; the Deltas."""
    margins = []
    for group in sorted({t.group for t in batch}):
        sides = []
        for sign in (1, -1):
            members = [i for i, t in enumerate(batch) if t.group == group and t.advantage * sign > 0]
            sides.append([logp[i] - batch[i].reference for i in members])
        if all(sides):
            margins.append(sum(sides[0]) - sum(sides[1]))
    values = [math.log1p(math.exp(-beta * margin)) for margin in margins]
    return sum(values) / max(1, len(values)), margins


# KL to a reference


def kl_terms(form: str, logp: Numbers, batch: Sequence[Token]) -> list[float]:
    result = []
    for x, t in zip(logp, batch, strict=True):
        if form == "k2":
            result.append((x - t.reference) ** 2 / 2)
        else:
            k3 = math.exp(t.reference - x) - 1 - (t.reference - x)
            result.append(math.exp(x - t.old) * k3)
    return result


# Rollout correction


def correct(
    kind: str, options: dict[str, Any], began: Numbers, batch: Sequence[Token]
) -> tuple[list[float], list[bool]]:
    """For each token the factor, and whether it stays."""
    defaults = {
        "token_tis": {"cap": 2.0},
        "sequence_tis": {"cap": 2.0, "level": "sequence"},
        "token_mask": {"low": 0.5, "high": 5.0},
        "sequence_mis": {"low": 0.5, "high": 2.0, "cap": 2.0, "level": "sequence"},
        "geometric_rejection": {"low": 0.999, "high": 1.001, "level": "sequence"},
        "k3_rejection": {"high": 0.01, "level": "sequence"},
    }[kind] | options
    level = defaults.get("level", "token")
    factors, kept = [], []
    for i in range(len(batch)):
        delta = [clamp(began[j] - batch[j].behaviour) for j in same(batch, level, i)]
        ratio = math.exp(clamp(sum(delta)))
        if kind in ("token_tis", "sequence_tis"):
            factor, stays = min(ratio, defaults["cap"]), True
        elif kind == "token_mask":
            factor, stays = ratio, defaults["low"] <= ratio <= defaults["high"]
        elif kind == "sequence_mis":
            factor, stays = min(ratio, defaults["cap"]), defaults["low"] <= ratio <= defaults["high"]
        elif kind == "geometric_rejection":
            factor, stays = 1.0, defaults["low"] <= math.exp(sum(delta) / len(delta)) <= defaults["high"]
        else:
            k3 = sum(math.exp(d) - 1 - d for d in delta) / len(delta)
            factor, stays = 1.0, k3 <= defaults["high"]
        factors.append(factor if stays else 0.0)
        kept.append(stays)
    return factors, kept


# Aggregation


def aggregate(kind: str, losses: Numbers, batch: Sequence[Token], keep: Sequence[bool], length: float) -> float:
    """The token losses as one number; tokens that are not kept are in no sum and in no count."""
    kept = [i for i in range(len(batch)) if keep[i]]
    if not kept:
        return 0.0
    if kind == "token_mean":
        return sum(losses[i] for i in kept) / len(kept)
    units: dict[tuple[int, ...], list[float]] = {}
    for i in kept:
        key = (batch[i].trajectory, batch[i].step) if kind == "step_mean" else (batch[i].trajectory,)
        units.setdefault(key, []).append(losses[i])
    if kind == "constant":
        return sum(sum(unit) for unit in units.values()) / (len(units) * length)
    return sum(sum(unit) / len(unit) for unit in units.values()) / len(units)


def slope(function: Callable[[list[float]], float], at: Numbers, direction: Numbers, step: float = 1e-6) -> float:
    """The derivative along a direction by central differences; nan where the two sides differ, at a kink."""
    ahead, behind = (function([x + sign * step * d for x, d in zip(at, direction, strict=True)]) for sign in (1, -1))
    here = function(list(at))
    right, left = (ahead - here) / step, (here - behind) / step
    return (right + left) / 2 if abs(right - left) < 1e-3 * (1 + abs(right)) else math.nan
