"""What one update of the learner must compute, in FLOPs, against what the machine can do.

A position costs 2 FLOPs a parameter of the body's matrices forward and 4 backward: 6, or 4 where those weights are
frozen (LoRA: their own gradient is not taken; the adapters' parameters cost 6). Attention costs 4 * heads * head_dim
FLOPs forward for each pair (position, position it sees) in each layer, and twice that backward: 12. The head costs 6
(frozen: 4) * hidden * output tokens at each position that predicts a trained token. Norms, activations and rotations
are left out; so is what is computed twice or for nothing (logits made again for the backward pass, pairs that a mask
hides): time for these lowers the utilisation, as it should.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from renma.learning.rows import Row
from renma.learning.tree import Pack, PackCost, pack

PEAK_SIZES = (1024, 2048)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """body: parameters of the layers' matrices; trained: of them (and of adapters) that get a gradient. windows: each
    layer's reach in positions, None: all. attended: heads * head_dim. head_trained: whether the head gets a gradient.
    """

    body: int
    trained: int
    windows: tuple[int | None, ...]
    attended: int
    hidden: int
    outputs: int
    head_trained: bool


def size_of(model: Any, output_ids: torch.Tensor | None) -> ModelSize:
    """The sizes of a causal language model (or peft model) that emits `output_ids`; None: its whole vocabulary."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = causal.config.get_text_config()
    matrices = [m.weight for m in causal.get_decoder().modules() if isinstance(m, nn.Linear)]
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    layers = config.num_hidden_layers
    kinds = kinds if len(kinds) == layers else [kinds[0]] * layers
    head = causal.get_output_embeddings()
    return ModelSize(
        body=sum(w.numel() for w in matrices),
        trained=sum(w.numel() for w in matrices if w.requires_grad),
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        attended=heads * head_dim,
        hidden=config.hidden_size,
        outputs=len(head.weight) if output_ids is None else len(output_ids),
        head_trained=head.weight.requires_grad,
    )


def update_flops(size: ModelSize, depths: np.ndarray, predictors: int) -> float:
    """FLOPs of a forward and backward pass. depths [N]: how many positions each position comes after."""
    pairs = sum(int(np.minimum(depths + 1, window or depths.max(initial=0) + 1).sum()) for window in size.windows)
    body = (4 * size.body + 2 * size.trained) * len(depths)
    head = (6 if size.head_trained else 4) * size.hidden * size.outputs * predictors
    return float(body + 12 * size.attended * pairs + head)


def distinct(rows: Sequence[Row]) -> Pack:
    """All the rows as one tree: each distinct beginning of a row is one position."""
    [tree] = pack(rows, 10**12, PackCost(quadratic=0))
    return tree


def matmul_peak(dtype: torch.dtype = torch.float32, seconds: float = 1.0) -> float:
    """The most FLOP/s of a square matrix product here and now, over sizes that fit the caches and that do not."""
    best = 0.0
    for size in PEAK_SIZES:
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        out = torch.empty(size, size, dtype=dtype)
        torch.mm(a, b, out=out)
        ends = time.perf_counter() + seconds / len(PEAK_SIZES)
        while time.perf_counter() < ends:
            started = time.perf_counter()
            torch.mm(a, b, out=out)
            best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best
