"""Attention over a pack, block by block: each block of nodes against what it can see, not against the whole pack.

A pack lists its nodes depth first, so all that the nodes [a, b) see lies in the path to a and in [a, b) itself: a node
y < a that is an ancestor of x in [a, b) has a between itself and x, and so is an ancestor of a. Scores are computed
for these alone. Their number grows with the pack's size times the depth of its rows; that of a masked [N, N] product
grows with the square of the size, which soon is most of the arithmetic and would force small packs.

Importing this module makes the attention known to transformers under the name `TREE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

TREE = "renma_tree"
BLOCK = 128  # nodes; fewer: more operations, more: more scores that are masked (measured at 64 to 256)


@dataclass(frozen=True, slots=True)
class Blocks:
    """What attention over a pack of N nodes needs to know.

    queries, keys: how many nodes each block has, and how many it reads. seen [sum of keys]: the nodes it reads, block
    after block. masks: of each block what is added to its scores, [1, 1, queries, keys].
    """

    queries: list[int]
    keys: list[int]
    seen: Tensor
    masks: list[Tensor]

    @classmethod
    def of(cls, visible: np.ndarray, dtype: torch.dtype, device: torch.device) -> Blocks:
        """visible [N, N]: what each node sees, itself and ancestors at most."""
        seen: list[np.ndarray] = []
        masks: list[Tensor] = []
        for start in range(0, len(visible), BLOCK):
            end = min(start + BLOCK, len(visible))
            # A window may hide all that is far up the path.
            path = np.flatnonzero(visible[start:end, :start].any(0))
            nodes = np.concatenate([path, np.arange(start, end)])
            hidden = torch.from_numpy(~visible[start:end, nodes]).to(device)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
            seen.append(nodes)
            masks.append(mask[None, None])
        return cls(
            [mask.shape[2] for mask in masks],
            [mask.shape[3] for mask in masks],
            torch.from_numpy(np.concatenate(seen)).to(device),
            masks,
        )

    def as_mask(self, dtype: torch.dtype) -> Tensor:
        """A tensor that a model hands on to its attention as it is, with the blocks on it."""
        mask = torch.zeros(1, 1, 1, 1, dtype=dtype, device=self.seen.device)
        mask.blocks = self  # type: ignore[attr-defined]
        return mask


def tree_attention(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scaling: float | None) -> Tensor:
    """O [1, H, N, D'] of query [1, H, N, D], key [1, G, N, D], value [1, G, N, D']; H a multiple of G."""
    # One gather for all blocks: its backward adds up what the blocks give to a shared node in one operation.
    keys = key.index_select(2, blocks.seen).split(blocks.keys, 2)
    values = value.index_select(2, blocks.seen).split(blocks.keys, 2)
    queries = query.split(blocks.queries, 2)
    grouped = query.shape[1] != key.shape[1]
    return torch.cat(
        [
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
            for q, k, v, mask in zip(queries, keys, values, blocks.masks, strict=True)
        ],
        2,
    )


def _tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In the form transformers calls an attention: output [B, Q, H, D], and no probabilities."""
    blocks = getattr(attention_mask, "blocks", None)
    if blocks is None or dropout or kwargs.get("softcap") is not None:
        raise ValueError(f"{type(module).__name__}: {TREE} attention is for packs, without dropout or capped scores")
    return tree_attention(query, key, value, blocks, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(TREE, _tree_attention_forward)
AttentionMaskInterface.register(TREE, eager_mask)
