"""Drawing one token a row from logits: one uniform number a row, inverted through the cumulative distribution.

The uniform number of a request's t-th token is a function of (seed, t) alone, so what is drawn depends neither on the
batch nor on the slot the request sits in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from renma.errors import ModelError
from renma.profiling import timed

BLOCK = 512  # vocabulary entries whose weights are summed together before the search
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number generators")."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """[n] numbers in [0, 1): output number `steps[i]` of a SplitMix64 stream that begins at a hash of `seeds[i]`."""
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + (steps.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        # 52 bits: the largest number times any total stays below that total in float64.
        return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


@dataclass(frozen=True, slots=True)
class Drawing:
    """How one batch is drawn: n draws from R rows of logits.

    uniform [n]; of [n]: the row each draw is from, None: row i for draw i. The rest [R]: inverse_temperature is 1 for
    greedy rows.
    """

    inverse_temperature: NDArray[np.float32]
    greedy: NDArray[np.bool_]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    uniform: NDArray[np.float64]
    of: NDArray[np.int64] | None = None


@timed("sampler")
def draw(logits: Tensor, how: Drawing) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """A column of `logits` [R, V] (float32; overwritten) for each draw, and its log softmax(logits / temperature).

    The log-probability is over all V. top_k keeps the k highest logits, then top_p the fewest of those that hold p of
    their probability, then min_p those with at least min_p of the highest one's probability. Equal logits at the edge
    of top_k or top_p are all kept.
    Raises ModelError when the logits are not finite.
    """
    rows, width = logits.shape
    device = logits.device
    if (how.inverse_temperature != 1.0).any():
        logits *= torch.from_numpy(how.inverse_temperature).to(device)[:, None]
    highest = logits.amax(-1, keepdim=True)
    blocks = -(-width // BLOCK)
    weights = logits.new_zeros(rows, blocks * BLOCK) if width % BLOCK else torch.empty_like(logits)
    torch.sub(logits, highest, out=weights[:, :width])
    weights[:, :width].exp_()
    sums = weights.view(rows, blocks, BLOCK).sum(-1).double()
    totals = sums.sum(-1)
    if not bool(torch.isfinite(totals).all()):
        raise ModelError("the policy's logits are not finite: the weights have diverged; lower the learning rate")

    filtered = np.flatnonzero(~how.greedy & ((how.top_k > 0) | (how.top_p < 1.0) | (how.min_p > 0.0)))
    if len(filtered):
        subset = torch.from_numpy(filtered).to(device)
        kept = weights[subset]
        _keep(kept[:, :width], how.top_k[filtered], how.top_p[filtered], how.min_p[filtered])
        weights[subset] = kept
        sums[subset] = kept.view(len(filtered), blocks, BLOCK).sum(-1).double()

    of = torch.arange(rows, device=device) if how.of is None else torch.from_numpy(how.of).to(device)
    columns = _invert(weights.view(rows, blocks, BLOCK), sums, torch.from_numpy(how.uniform).to(device), of)
    if how.greedy.any():
        greedy = torch.from_numpy(how.greedy).to(device)
        columns = torch.where(greedy[of], logits.argmax(-1)[of], columns)
    shifted = (logits[of, columns] - highest[of, 0]).double()
    return columns.cpu().numpy(), (shifted - totals.log()[of]).float().cpu().numpy()


def _invert(weights: Tensor, sums: Tensor, uniform: Tensor, of: Tensor) -> Tensor:
    """Inverse of the cumulative distribution of row `of` [n] at `uniform` [n]: first the block, then the entry in it.

    weights [R, blocks, BLOCK], sums [R, blocks] of them. An entry of weight 0 is never chosen: the search gives the
    first whose cumulative weight is *above* the mark.
    """
    sums = sums[of]
    cumulative = sums.cumsum(-1)
    mark = (uniform * cumulative[:, -1])[:, None]
    block = torch.searchsorted(cumulative, mark, right=True)
    size = sums.gather(1, block)
    rest = (mark - (cumulative.gather(1, block) - size)) / size
    inner = weights[of, block.squeeze(1)].double().cumsum(-1)
    total = inner[:, -1:]
    rest = (rest.clamp(min=0.0) * total).minimum(total * (1 - 2.0**-52))
    return block.squeeze(1) * weights.shape[2] + torch.searchsorted(inner, rest, right=True).squeeze(1)


def _keep(weights: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64], min_p: NDArray[np.float64]) -> None:
    """Set to 0, in place, the weights [m, V] (1 for the likeliest entry of a row) that a row's filters leave out."""
    device, width = weights.device, weights.shape[1]
    cut = (top_k > 0) & (top_k < width)
    if cut.any():
        best = weights.topk(int(top_k[cut].max()), dim=-1).values
        kth = best.gather(1, torch.from_numpy(np.where(cut, top_k, 1) - 1).to(device)[:, None])
        kth = torch.where(torch.from_numpy(cut).to(device)[:, None], kth, kth.new_zeros(()))
        weights.masked_fill_(weights < kth, 0.0)
    if (top_p < 1.0).any():
        ordered = weights.sort(dim=-1, descending=True).values
        before = ordered.double().cumsum(-1) - ordered.double()
        total = ordered.sum(-1, keepdim=True, dtype=torch.float64)
        share = torch.from_numpy(np.where(top_p < 1.0, top_p, np.inf)).to(device)[:, None]
        count = (before < share * total).sum(-1, keepdim=True).clamp(min=1)
        weights.masked_fill_(weights < ordered.gather(1, count - 1), 0.0)
    if (min_p > 0.0).any():
        weights.masked_fill_(weights < torch.from_numpy(min_p).to(device)[:, None], 0.0)
