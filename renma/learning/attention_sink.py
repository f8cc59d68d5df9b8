"""Attention with a sink: a learnt logit a head that takes probability and gives nothing (GPT-OSS).

P_ij = e^{S_ij} / (sum_j e^{S_ij} + e^{s_h}), O_i = sum_j P_ij V_j. Only O and L_i = log(sum_j e^{S_ij} + e^{s_h}) are
kept for the backward, which computes P = e^{S - L} again, some queries at a time (Dao et al. 2022, FlashAttention):
with D_i = dO_i . O_i, dS_ij = P_ij (dO_i . V_j - D_i) and ds_h = -sum_i e^{s_h - L_i} D_i.

transformers' own ("eager") keeps several [heads, N, N] tensors a layer. Importing this module makes the attention known
to transformers under the name `SINKS`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

SINKS = "renma_sinks"
CHUNK = 128  # queries whose probabilities are in memory at once


class _Block(NamedTuple):
    """Queries [start, end) and the keys [low, high) outside which they see nothing."""

    start: int
    end: int
    low: int
    high: int


def sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """O [B, H, Q, D'] of query [B, H, Q, D], key [B, G, K, D], value [B, G, K, D'], sinks [H]; H a multiple of G.

    mask: [B or 1, 1, Q, K], added to the scores (0, or very low where a query does not see a key; windows are in it);
    it gets no gradient. Differentiable once in all the others. A query that sees nothing has output 0.
    """
    if mask is not None and (mask.dim() != 4 or mask.shape[1] != 1 or not mask.is_floating_point()):
        raise ValueError(f"a mask to add, [B or 1, 1, Q, K], is needed; got {mask.dtype} {tuple(mask.shape)}")
    out: Tensor = _SinkAttention.apply(query, key, value, sinks, mask, scaling)
    return out


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        blocks = _blocks(mask, query.shape[2], key.shape[2])
        groups = key.shape[1]
        exact = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(*query.shape[:3], value.shape[3])
        logsum = query.new_empty(query.shape[:3], dtype=exact)
        sink = sinks.to(exact)[:, None]
        for block in blocks:
            start, end, low, high = block
            scores = _scores(query, key, mask, block, scaling, exact)
            top = sink.expand(len(sink), end - start)
            highest = torch.maximum(scores.amax(-1), top) if high > low else top.expand(logsum.shape[0], -1, -1)
            weights = scores.sub_(highest[..., None]).exp_()
            total = weights.sum(-1).add_((top - highest).exp_())
            logsum[:, :, start:end] = highest + total.log()
            part = _by_group(weights.to(value.dtype), groups) @ value[:, :, low:high]
            out[:, :, start:end] = _by_head(part, end - start) / total[..., None].to(out.dtype)
        ctx.save_for_backward(query, key, value, sinks, mask, out, logsum)
        ctx.blocks, ctx.scaling = blocks, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, mask, out, logsum = ctx.saved_tensors
        groups, exact = key.shape[1], logsum.dtype
        grad_query = torch.zeros_like(query)
        grad_key, grad_value = torch.zeros_like(key, dtype=exact), torch.zeros_like(value, dtype=exact)
        inner = (grad.to(exact) * out.to(exact)).sum(-1)
        for block in ctx.blocks:
            start, end, low, high = block
            size, seen = end - start, slice(low, high)
            rows = _by_group(query[:, :, start:end], groups)
            grad_out = _by_group(grad[:, :, start:end], groups)
            weights = _scores(query, key, mask, block, ctx.scaling, exact)
            weights.sub_(logsum[:, :, start:end, None]).exp_()
            grad_value[:, :, seen] += _by_group(weights.to(grad.dtype), groups).mT @ grad_out
            grad_scores = _by_head(grad_out @ value[:, :, seen].mT, size).to(exact)
            grad_scores = grad_scores.sub_(inner[:, :, start:end, None]).mul_(weights).mul_(ctx.scaling)
            grouped = _by_group(grad_scores.to(query.dtype), groups)
            grad_query[:, :, start:end] = _by_head(grouped @ key[:, :, seen], size)
            grad_key[:, :, seen] += grouped.mT @ rows
        grad_sinks = -((sinks.to(exact)[:, None] - logsum).exp() * inner).sum((0, 2))
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks.to(sinks.dtype), None, None


def _blocks(mask: Tensor | None, queries: int, keys: int) -> list[_Block]:
    """The chunks of queries, each with the span of keys that it sees: causal and windowed masks leave most out."""
    starts = range(0, queries, CHUNK)
    if mask is None:
        return [_Block(start, min(start + CHUNK, queries), 0, keys) for start in starts]
    hidden = torch.finfo(mask.dtype).min / 2
    seen = (mask > hidden).any(0)[0]
    by_chunk = torch.stack([seen[start : start + CHUNK].any(0) for start in starts]).cpu()
    blocks: list[_Block] = []
    for start, row in zip(starts, by_chunk, strict=True):
        found = row.nonzero()
        low, high = (int(found[0]), int(found[-1]) + 1) if len(found) else (0, 0)
        blocks.append(_Block(start, min(start + CHUNK, queries), low, high))
    return blocks


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, block: _Block, scaling: float, exact: torch.dtype
) -> Tensor:
    """[B, H, q, k] of a block, the mask added; the caller's to overwrite."""
    start, end, low, high = block
    product = _by_group(query[:, :, start:end], key.shape[1]) @ key[:, :, low:high].mT
    scores = _by_head(product, end - start).to(exact).mul_(scaling)
    return scores if mask is None else scores.add_(mask[:, :, start:end, low:high])


def _by_group(heads: Tensor, groups: int) -> Tensor:
    """[B, H, q, d] to [B, G, H/G q, d]: the heads that share keys, one under the other."""
    batch, count, size, width = heads.shape
    return heads.reshape(batch, groups, count // groups * size, width)


def _by_head(grouped: Tensor, size: int) -> Tensor:
    """The way back from `_by_group`, for q = `size`."""
    batch, groups, lines, width = grouped.shape
    return grouped.reshape(batch, groups * lines // size, size, width)


def _sink_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In the form transformers calls an attention: output [B, Q, H, D], and no probabilities."""
    if dropout:
        raise ValueError(f"{SINKS} attention has no dropout, and {dropout} was asked for")
    if s_aux is None:
        raise ValueError(f"{type(module).__name__} has no attention sinks: {SINKS} attention is for models that have")
    out = sink_attention(query, key, value, s_aux, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(SINKS, _sink_attention_forward)
AttentionMaskInterface.register(SINKS, eager_mask)
