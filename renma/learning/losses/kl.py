"""Estimates of KL(pi || ref) from the policy's own samples, and what each is good for (case 2.13).

`k1` in the reward; `k2`, or `k3_ratio`, in the loss; `k3` for measuring. As a loss, k1 has an expected gradient of 0
and k3 a biased one.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from torch import Tensor

from renma.learning.losses.base import log_ratio

KlForm = Literal["k2", "k3_ratio"]
Array = TypeVar("Array", bound=Any)


def k1(logp: Array, reference: Array) -> Array:
    """log pi - log ref of each token, arrays or tensors [n]: unbiased, of either sign. Times -kl it is a reward."""
    return logp - reference


def k2(logp: Tensor, reference: Tensor) -> Tensor:
    """(log pi - log ref)**2 / 2: as a loss on the policy's own samples its expected gradient is that of KL(pi||ref)."""
    return 0.5 * (logp - reference) ** 2


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    """ref/pi - 1 - log(ref/pi): an estimate of KL(pi||ref), never negative. For measuring; as a loss it is biased."""
    difference = log_ratio(reference, logp)
    return difference.exp() - 1 - difference


def k3_ratio(logp: Tensor, reference: Tensor, old: Tensor) -> Tensor:
    """pi/pi_old * k3, with a gradient through both: on samples of pi_old its expectation is KL(pi||ref) itself, and its
    expected gradient that of KL(pi||ref), on the policy's own samples and off them."""
    return log_ratio(logp, old).exp() * k3(logp, reference)
