"""Tiny mixture-of-experts models, one of each kind of router, and what they choose in a plain forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from renma.types import Routing
from tests.inference.tiny_models import SIZES

LAYERS, CHOSEN, EXPERTS = 2, 2, 4
_QWEN: dict[str, Any] = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 16}
_LOCAL: dict[str, Any] = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
_OLMO = {name: size for name, size in SIZES.items() if name != "head_dim"}

MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, **_LOCAL)),
    "qwen2-moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SIZES, **_QWEN, shared_expert_intermediate_size=16, norm_topk_prob=False)
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **_QWEN, norm_topk_prob=True)),
    "olmoe": lambda: OlmoeForCausalLM(
        OlmoeConfig(**_OLMO, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, pad_token_id=None)
    ),
    # One layer with a window, one without; sinks in both.
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**SIZES, **_LOCAL, sliding_window=12)),
}
KINDS = list(MAKERS)


def make(kind: str, seed: int = 0, scale: float = 4.0) -> PreTrainedModel:
    """A model in which experts differ and every token depends on those before it."""
    torch.manual_seed(seed)
    model = MAKERS[kind]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "lm_head" not in name:
                parameter.mul_(scale)
    return model.eval()


@contextmanager
def experts_used(model: Any) -> Iterator[list[torch.Tensor]]:
    """The experts that each layer's positions are really sent to, [positions, k] a layer, as the forward goes on."""
    used: list[torch.Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: used.append(args[1]))
        for module in model.modules()
        if type(module).__name__.endswith("Experts")
    ]
    try:
        yield used
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def plain_routing(model: Any, ids: Sequence[int]) -> Routing:
    """[T, layers, k] the experts of the ids in one forward of the whole model."""
    with experts_used(model) as used:
        model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return np.stack([layer.numpy() for layer in used], 1).astype(np.int16)
