"""What a policy loss is: a function of a pack's tokens, with attributes that say what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from renma.learning.correction import CLAMP
from renma.learning.units import Level


@dataclass(frozen=True, slots=True)
class LossInput:
    """Flat tensors over n sampled tokens: those of one pack.

    logp: log pi of the token, with gradient. old: log pi_old, the policy whose ratio is clipped. behaviour: log mu, as
    recorded when it was sampled (NaN for a demonstration). advantage: A. entropy: of the distribution it was drawn
    from, or None. trajectory, step, group int64: which trajectory of the batch, which step of it, which group of the
    batch (-1 or None: in none). reference: log ref, where one is given. prepared: what the loss's own `prepare` gave,
    where it was called. All but `logp` and `entropy` carry no gradient.

    A token's whole step is always among them, its whole trajectory only where that is one row.
    """

    logp: Tensor
    old: Tensor
    behaviour: Tensor
    advantage: Tensor
    entropy: Tensor | None
    trajectory: Tensor
    step: Tensor
    group: Tensor | None = None
    reference: Tensor | None = None
    prepared: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Flat arrays over all n trained tokens of a whole optimiser step, named as in `LossInput`: what a loss's `prepare`
    sees. logp is from a pass without gradient, by the very policy whose gradient is taken next."""

    logp: NDArray[Any]
    old: NDArray[Any]
    behaviour: NDArray[Any]
    reference: NDArray[Any] | None
    advantage: NDArray[Any]
    trajectory: NDArray[Any]
    step: NDArray[Any]
    group: NDArray[Any]


PolicyLoss = Callable[[LossInput], tuple[Tensor, dict[str, Tensor]]]
"""The loss [n] of each token, and its statistics, each [n]: the learner reports the mean of a statistic over the
tokens, or the maximum of one whose name ends in `_max`. `Traits` lists the attributes that it may carry."""

Prepare = Callable[[StepTokens], NDArray[Any]]
Summary = Callable[[StepTokens, NDArray[Any]], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Traits:
    """The attributes of a loss; one that it does not carry has the value here.

    scales_with_advantage: its gradient is exactly 0 wherever the advantage is: such rows need no backward pass.
    against: the policy that its own ratio is taken against: "old", "behaviour" (it makes up for what mu did
    otherwise), or "nothing".
    supervised: it learns what was given, whoever wrote it; nothing recorded when sampling plays a part.
    needs_recompute: pi_old must be another policy than mu, or nothing is left of it (`old_logprobs: behaviour`).
    takes_demonstrations: tokens without a recorded log-probability (NaN) are demonstrations to it, not a fault.
    level: over which tokens its ratio is taken. needs_reference: it looks at `LossInput.reference`.
    whole_groups: an optimiser step must not divide a group.
    prepare: [n] float of the whole optimiser step, which the loss then finds as `LossInput.prepared`; a token with NaN
    there takes no part (it is in no normaliser). Called once an optimiser step, after a pass without gradient; at level
    "sequence" only where some trajectory has several rows, for else every pack has all that the loss needs.
    summary: numbers about the whole optimiser step, of what `prepare` saw and gave.
    """

    scales_with_advantage: bool = False
    against: Literal["old", "behaviour", "nothing"] = "old"
    supervised: bool = False
    needs_recompute: bool = False
    takes_demonstrations: bool = False
    level: Level = "token"
    needs_reference: bool = False
    whole_groups: bool = False
    prepare: Prepare | None = None
    summary: Summary | None = None


Loss = TypeVar("Loss", bound=Callable[..., Any])


def traits(loss: PolicyLoss) -> Traits:
    """What the loss says of itself."""
    return Traits(**{f.name: getattr(loss, f.name) for f in fields(Traits) if hasattr(loss, f.name)})


def having(loss: Loss, **attributes: Any) -> Loss:
    """The loss, carrying the attributes (of `Traits`)."""
    for name, value in attributes.items():
        setattr(loss, name, value)
    return loss


def scales_with_advantage(loss: Loss) -> Loss:
    """Marks a loss whose gradient is exactly 0 wherever the advantage is: such rows need no backward pass."""
    return having(loss, scales_with_advantage=True)


def log_ratio(logp: Tensor, old: Tensor) -> Tensor:
    """log pi - log pi_old, held within +-20 so that its exponential is finite."""
    return (logp - old).clamp(-CLAMP, CLAMP)


def clipped(advantage: Tensor, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, low, high)) [n], and where a bound took the gradient away [n] bool."""
    plain, held = -advantage * ratio, -advantage * ratio.clamp(low, high)
    return torch.maximum(plain, held), held > plain


def ratio_statistics(ratio: Tensor, bound: Tensor) -> dict[str, Tensor]:
    """ratio_mean, ratio_max, and clip_share: the share of tokens where `bound`."""
    seen = ratio.detach()
    return {"ratio_mean": seen, "ratio_max": seen, "clip_share": bound.to(torch.float32)}


def weighed(charge: Tensor, factor: Tensor) -> Tensor:
    """charge * factor, of exactly equal shapes: a loss of one number a sequence times weights of one a token would
    broadcast to all pairs (case 6.6). Raises ValueError for shapes that differ."""
    if charge.shape != factor.shape:
        raise ValueError(
            f"a loss of shape {tuple(charge.shape)} times weights of shape {tuple(factor.shape)}: give the loss one "
            "value a token, or bring the weights to the level of the loss first"
        )
    return charge * factor
