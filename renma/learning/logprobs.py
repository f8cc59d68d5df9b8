"""Log-probabilities of chosen tokens from hidden states, without ever holding all logits.

logits = scale * (W h + b), soft-capped where the model does, divided by the temperature; log-softmax over the rows of
W, in float32. A chunk of positions has its logits at a time; the backward pass makes them again (case 8.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The vocabulary is walked in pieces that stay in the processor's cache: exp and the sums then cost little beside W h.
CACHE_ENTRIES = 1 << 18


@dataclass(frozen=True, slots=True)
class LogitRule:
    """From W h + b to the logits that are sampled from: times `scale`, soft-capped, divided by the temperature."""

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    positions: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    rule: LogitRule | None = None,
    chunk: int = 256,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits)[target] for each of n tokens, and the entropy at each of M positions; both differentiable.

    hidden [M, H]. weight [V, H]. targets [n] int64 in [0, V). positions [n] int64 ascending: the position of `hidden`
    that predicts each token; None: one token for each position. bias [V] or None.
    Returns float32 [n] and [M] (nats; float64 for float64 weights). Memory beyond inputs and gradients: chunk * V
    logits.
    """
    if positions is None:
        positions = torch.arange(len(hidden), device=hidden.device)
    logp, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, positions, rule or LogitRule(), chunk)
    return logp, entropy


class _TokenLogprobs(torch.autograd.Function):
    """Vocabulary-major ([V, C]) logits: the faster layout of the matrix product for few positions and many tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        positions: Tensor,
        rule: LogitRule,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        count, exact = len(hidden), _exact(weight)
        normaliser, entropy = hidden.new_empty(count, dtype=exact), hidden.new_empty(count, dtype=exact)
        logp = hidden.new_empty(len(targets), dtype=exact)
        logits = _Logits(weight, bias, rule, min(chunk, count))
        for start, end, first, last in _chunks(count, chunk, positions):
            z = logits.of(hidden[start:end])
            logp[first:last] = z[targets[first:last], positions[first:last] - start]
            normaliser[start:end], entropy[start:end] = _log_sum_exp(z)
        logp -= normaliser[positions]
        ctx.save_for_backward(hidden, weight, bias, targets, positions, normaliser, entropy)
        ctx.rule, ctx.chunk = rule, chunk
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, weight, bias, targets, positions, normaliser, entropy = ctx.saved_tensors
        rule: LogitRule = ctx.rule
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        if grad_logp is None:
            grad_logp = torch.zeros(len(targets), dtype=normaliser.dtype, device=hidden.device)
        per_position = torch.zeros_like(normaliser).index_add_(0, positions, grad_logp)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # In float32 whatever the compute type: the chunks' parts add up without rounding.
        grad_weight = torch.zeros_like(weight, dtype=_exact(weight)) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=_exact(weight)) if wants_bias else None
        logits = _Logits(weight, bias, rule, min(ctx.chunk, len(hidden)))
        for start, end, first, last in _chunks(len(hidden), ctx.chunk, positions):
            z = logits.of(hidden[start:end])
            slope = None if rule.softcap is None else 1 - (z * (rule.temperature / rule.softcap)) ** 2
            z -= normaliser[start:end]
            if grad_entropy is None:
                grad = z.exp_().mul_(-per_position[start:end])
            else:
                # dH/dz_v = -p_v (log p_v + H)
                inner = (z + entropy[start:end]).mul_(grad_entropy[start:end]).add_(per_position[start:end])
                grad = z.exp_().mul_(inner).neg_()
            where = (targets[first:last], positions[first:last] - start)
            grad.index_put_(where, grad_logp[first:last], accumulate=True)
            if slope is not None:
                grad *= slope
            factor = rule.scale / rule.temperature
            if factor != 1:
                grad *= factor
            low = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[start:end] = low.T @ weight
            if grad_weight is not None:
                if low.dtype == grad_weight.dtype:
                    grad_weight.addmm_(low, hidden[start:end])
                else:
                    grad_weight += low @ hidden[start:end]
            if grad_bias is not None:
                grad_bias += grad.sum(1)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class _Logits:
    """Makes the logits [V, C] of one chunk after another in one buffer: a chunk's are gone when the next are made."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rule: LogitRule, chunk: int) -> None:
        self.weight, self.bias, self.rule = weight, bias, rule
        self.buffer = torch.empty(len(weight) * chunk, dtype=weight.dtype, device=weight.device)

    def of(self, hidden: Tensor) -> Tensor:
        rule = self.rule
        raw = self.buffer[: len(self.weight) * len(hidden)].view(len(self.weight), len(hidden))
        torch.mm(self.weight, hidden.to(self.weight.dtype).T, out=raw)
        z = raw.to(_exact(raw))
        if self.bias is not None:
            z += self.bias[:, None]
        if rule.softcap is None:
            if rule.scale != rule.temperature:
                z *= rule.scale / rule.temperature
        else:
            z *= rule.scale / rule.softcap
            z.tanh_()
            z *= rule.softcap / rule.temperature
        return z


def _log_sum_exp(z: Tensor) -> tuple[Tensor, Tensor]:
    """log sum exp [C] and entropy [C] of logits [V, C]; z is used up."""
    top = z.amax(0)
    total, moment = torch.zeros_like(top), torch.zeros_like(top)
    rows = max(1, CACHE_ENTRIES // z.shape[1])
    for piece in z.split(rows):
        piece -= top
        weights = piece.exp()
        total += weights.sum(0)
        moment += weights.mul_(piece).sum(0)
    log_total = total.log()
    return top + log_total, log_total - moment / total


def _chunks(count: int, chunk: int, positions: Tensor) -> list[tuple[int, int, int, int]]:
    """Even chunks [start, end) of the positions, each with its tokens [first, last)."""
    number = -(-count // chunk)
    edges = [round(i * count / number) for i in range(number + 1)] if number else []
    cuts = torch.searchsorted(positions, torch.tensor(edges, device=positions.device)).tolist() if number else []
    return [(edges[i], edges[i + 1], cuts[i], cuts[i + 1]) for i in range(number)]
