"""The two recursions of credit: discounted sums, and generalised advantage estimation (GAE) on top of them.

They run over compressed sequences: only what the policy chose (sampled tokens, or the steps that hold some). What lies
between, observations and padding, is taken out first, so gamma does not decay over it and no critic value read there
can leak in. Many sequences are laid end to end and named by their `lengths`; one call walks all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from renma.credit.base import Values

Lengths = Sequence[int] | NDArray[np.integer[Any]]


def discounted(values: ArrayLike, factor: float, lengths: Lengths | None = None) -> Values:
    """y_t = x_t + factor * y_{t+1}, from the end of each sequence. values [n] float64; lengths sum to n (None: one).

    With rewards and gamma these are the returns-to-go.
    """
    sums = np.array(values, dtype=np.float64)
    sizes = _sizes(sums, lengths)
    if factor == 0 or not len(sums):
        return sums
    longest_first = np.argsort(-sizes, kind="stable")
    ends = (np.cumsum(sizes) - 1)[longest_first]
    sizes = sizes[longest_first]
    # Walking back from the ends, the sequences that still have a place are always the first ones.
    alive = np.searchsorted(-sizes, -np.arange(sizes[0]), side="left")
    for back in range(1, int(sizes[0])):
        here = ends[: alive[back]] - back
        sums[here] += factor * sums[here + 1]
    return sums


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    final: ArrayLike = 0.0,
    gamma: float = 1.0,
    lam: float = 1.0,
    lengths: Lengths | None = None,
) -> Values:
    """[n] advantages (Schulman et al. 2016, arXiv 1506.02438, equation 16), not whitened.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}. rewards, values [n]; final: V after the last
    item of each sequence, one number or [sequences]: 0 where it terminated. The critic's targets are A + values.
    """
    reward, value = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if reward.shape != value.shape:
        raise ValueError(f"gae needs one value a reward; got {value.shape} values and {reward.shape} rewards")
    sizes = _sizes(value, lengths)
    after = np.empty_like(value)
    after[:-1] = value[1:]
    filled = sizes > 0
    ends = np.cumsum(sizes)[filled] - 1
    after[ends] = np.broadcast_to(np.asarray(final, dtype=np.float64), sizes.shape)[filled]
    return discounted(reward + gamma * after - value, gamma * lam, sizes)


def compress(rewards: ArrayLike, mask: ArrayLike) -> Values:
    """rewards [n], mask [n] (true: sampled) -> [sampled tokens]: the rewards of the sampled tokens.

    A reward on a masked token was earned by what was sampled before it: it is folded onto the last sampled token
    before, or the first one where none comes before. Raises ValueError where a reward has no sampled token to lie on.
    """
    reward, sampled = np.asarray(rewards, dtype=np.float64), np.asarray(mask, dtype=bool)
    if reward.shape != sampled.shape:
        raise ValueError(f"a mask must match the rewards; got {sampled.shape} and {reward.shape}")
    count = int(sampled.sum())
    if not count:
        if reward.any():
            raise ValueError("rewards without a sampled token: nothing that was chosen earned them")
        return np.zeros(0)
    folded = np.zeros(count)
    np.add.at(folded, np.maximum(np.cumsum(sampled) - 1, 0), reward)
    return folded


def masked_gae(
    rewards: ArrayLike, values: ArrayLike, mask: ArrayLike, final: float = 0.0, gamma: float = 1.0, lam: float = 1.0
) -> Values:
    """`gae` of one padded sequence: [n] advantages, 0 where masked. What values hold there plays no part."""
    sampled = np.asarray(mask, dtype=bool)
    advantages = np.zeros(sampled.shape)
    kept = np.asarray(values, dtype=np.float64)[sampled]
    advantages[sampled] = gae(compress(rewards, sampled), kept, final, gamma, lam)
    return advantages


def masked_returns(rewards: ArrayLike, mask: ArrayLike, gamma: float = 1.0) -> Values:
    """Returns-to-go of one padded sequence: [n], 0 where masked."""
    sampled = np.asarray(mask, dtype=bool)
    returns = np.zeros(sampled.shape)
    returns[sampled] = discounted(compress(rewards, sampled), gamma)
    return returns


def _sizes(values: Values, lengths: Lengths | None) -> NDArray[np.int64]:
    sizes = np.asarray([len(values)] if lengths is None else lengths, dtype=np.int64)
    if int(sizes.sum()) != len(values) or (sizes < 0).any():
        raise ValueError(f"lengths of {int(sizes.sum())} items in all do not divide {len(values)} values")
    return sizes
