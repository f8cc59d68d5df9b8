"""One token for each of many rows, with fewer and larger operations than a model's own forward.

What a round of decoding costs beside its matrix products is the launching of many small operations, and the reading of
the keys and values of all rows. So: one normalisation, one rotation for queries and keys together, no modules in
between; and the beginning that all rows share (the few-shot header, a group's prompt) is read once for all of them, as
one matrix product, in place of once a row.

Weights are the model's own, read in place through its own projections (adapters stay in force). Only families that are
known here are run so, and only after a comparison with the model's own forward (policy.py); any other model, and every
prompt, takes the model's own way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from renma.inference.local.cache import SlotCache, SlotLayer

# Attention over given keys and values, rotary positions, gated feed-forward, root-mean-square norms; nothing else.
FAMILIES = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "Gemma3DecoderLayer",
)
# A shared beginning shorter than this is read with the rest: splitting attention has a cost of its own.
WORTH_SPLITTING = 32


class Decoder:
    """Hidden states of new tokens, from the decoder layers of `base` and the cache. See `of`."""

    def __init__(self, base: Any, kinds: list[str]) -> None:
        self.base = base
        self.kinds = kinds  # of each layer
        self.by_kind = len(set(kinds)) > 1
        first = base.layers[0].self_attn
        self.head_dim: int = first.head_dim
        self.groups: int = first.num_key_value_groups
        self.scaling: float = float(first.scaling)
        self.sandwich = hasattr(base.layers[0], "pre_feedforward_layernorm")
        self._norms: dict[int, tuple[Tensor, float]] = {}

    @classmethod
    def of(cls, base: nn.Module, kinds: list[str]) -> Decoder | None:
        """For a model whose every layer is of a family known here; else None. kinds: the attention of each layer."""
        layers: Any = getattr(base, "layers", None)
        if not layers or any(type(layer).__name__ not in FAMILIES for layer in layers):
            return None
        return cls(base, kinds)

    def forget(self) -> None:
        """The weights have changed."""
        self._norms.clear()

    def __call__(
        self, ids: Tensor, positions: Tensor, cache: SlotCache, masks: Mapping[str, Tensor], length: int, shared: int
    ) -> Tensor:
        """[B, H] hidden states, normalised, of tokens `ids` [B] at `positions` [B] of rows 0..B-1.

        masks: for each kind of attention what is added to the scores, [B, 1, length]. length: positions that are
        read. shared: how many first positions are equal in all rows.
        """
        base = self.base
        hidden = base.embed_tokens(ids)
        turns = {kind: self._rotation(hidden, positions, kind) for kind in set(self.kinds)}
        shared = shared if shared >= WORTH_SPLITTING and len(ids) > 1 else 0
        for layer, kind, stored in zip(base.layers, self.kinds, cache.stored, strict=True):
            mixed = self._attend(
                layer.self_attn,
                self._norm(layer.input_layernorm, hidden),
                turns[kind],
                stored,
                positions,
                masks[kind],
                length,
                shared,
            )
            if self.sandwich:
                hidden = hidden + self._norm(layer.post_attention_layernorm, mixed)
                new = self._feed(layer.mlp, self._norm(layer.pre_feedforward_layernorm, hidden))
                hidden = hidden + self._norm(layer.post_feedforward_layernorm, new)
            else:
                hidden = hidden + mixed
                hidden = hidden + self._feed(layer.mlp, self._norm(layer.post_attention_layernorm, hidden))
        return self._norm(base.norm, hidden)

    def _attend(
        self,
        attention: Any,
        hidden: Tensor,
        turn: tuple[Tensor, Tensor],
        stored: SlotLayer,
        positions: Tensor,
        mask: Tensor,
        length: int,
        shared: int,
    ) -> Tensor:
        rows, size = len(hidden), self.head_dim
        queries = attention.q_proj(hidden).view(rows, -1, size)
        keys = attention.k_proj(hidden).view(rows, -1, size)
        values = attention.v_proj(hidden).view(rows, -1, size)
        if hasattr(attention, "q_norm"):
            queries, keys = self._norm(attention.q_norm, queries), self._norm(attention.k_norm, keys)
        heads = queries.shape[1]
        both = torch.cat((queries, keys), 1)
        half = size // 2
        both = torch.addcmul(both * turn[0], torch.cat((both[..., half:], both[..., :half]), -1), turn[1])
        queries, keys = both[:, :heads], both[:, heads:]
        stored.append(keys, values, positions)
        # Scores of the shared beginning, from the first row alone, and of the rest of each row.
        kv_heads = keys.shape[1]
        own_keys = stored.keys[:rows].flatten(0, 1)[:, shared:length]
        own_values = stored.values[:rows].flatten(0, 1)[:, shared:length]
        grouped = (queries * self.scaling).view(rows * kv_heads, self.groups, size)
        scores = torch.bmm(grouped, own_keys.transpose(1, 2)).view(rows, heads, length - shared)
        if shared:
            first = self._by_kv_head(grouped, rows, kv_heads)
            common = torch.bmm(first, stored.keys[0, :, :shared].transpose(1, 2))
            scores = torch.cat((self._by_row(common, rows, kv_heads), scores), -1)
        weights = torch.softmax(scores + mask, -1, dtype=torch.float32).to(hidden.dtype)
        own = weights[..., shared:].reshape(rows * kv_heads, self.groups, length - shared)
        mixed = torch.bmm(own, own_values).view(rows, heads, size)
        if shared:
            ahead = weights[..., :shared].reshape(rows * kv_heads, self.groups, shared)
            common = torch.bmm(self._by_kv_head(ahead, rows, kv_heads), stored.values[0, :, :shared])
            mixed = mixed + self._by_row(common, rows, kv_heads)
        projected: Tensor = attention.o_proj(mixed.view(rows, heads * size))
        return projected

    def _by_kv_head(self, tensor: Tensor, rows: int, kv_heads: int) -> Tensor:
        """[rows * kv_heads, groups, n] to [kv_heads, rows * groups, n]."""
        split = tensor.view(rows, kv_heads, self.groups, -1).transpose(0, 1)
        return split.reshape(kv_heads, rows * self.groups, -1)

    def _by_row(self, tensor: Tensor, rows: int, kv_heads: int) -> Tensor:
        """[kv_heads, rows * groups, n] to [rows, heads, n]."""
        split = tensor.view(kv_heads, rows, self.groups, -1).transpose(0, 1)
        return split.reshape(rows, kv_heads * self.groups, -1)

    @staticmethod
    def _feed(mlp: Any, hidden: Tensor) -> Tensor:
        projected: Tensor = mlp.down_proj(mlp.act_fn(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))
        return projected

    def _rotation(self, hidden: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Cosines, and sines whose first half is negative, [B, 1, head_dim] each."""
        at = positions[None]
        cosine, sine = self.base.rotary_emb(hidden, at, kind) if self.by_kind else self.base.rotary_emb(hidden, at)
        sine = sine[0].clone()
        sine[:, : self.head_dim // 2].neg_()
        return cosine[0][:, None], sine[:, None]

    def _norm(self, module: Any, hidden: Tensor) -> Tensor:
        known = self._norms.get(id(module))
        if known is None:
            known = self._norms[id(module)] = _scale(module)
        scale, eps = known
        if hidden.dtype == scale.dtype:
            return F.rms_norm(hidden, (hidden.shape[-1],), scale, eps)
        return F.rms_norm(hidden.to(scale.dtype), (hidden.shape[-1],), scale, eps).to(hidden.dtype)


def _scale(module: Any) -> tuple[Tensor, float]:
    """What a root-mean-square norm multiplies by, in float32 at least, and its epsilon."""
    weight = module.weight.to(torch.promote_types(module.weight.dtype, torch.float32))
    if type(module).__name__.startswith("Gemma"):
        return 1.0 + weight, module.eps
    return weight, module.variance_epsilon
