"""Tiny models made from scratch and a byte-level tokenizer, for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from renma.inference import Sample

VOCABULARY = 260
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "head_dim": 8,
}
MIXTURE = {"num_experts_per_tok": 2, "num_local_experts": 4}
GEMMA = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}

MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-eager": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager")),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **GEMMA)),
    "gemma3-eager-softcap": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, **GEMMA, final_logit_softcapping=2.0, attn_implementation="eager")
    ),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=10)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, **MIXTURE)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
    ),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0, residual_multiplier=0.7)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=96, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
    ),
}


def make(name: str, seed: int = 0) -> PreTrainedModel:
    """A model with weights large enough that its distributions are far from flat and differ by position."""
    torch.manual_seed(seed)
    model = MAKERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model.train()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0-3 are <pad> <end> <x> <y>; 4-259 are the bytes 0-255."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=byte_of)
    vocabulary = {"<pad>": 0, "<end>": 1, "<x>": 2, "<y>": 3}
    vocabulary.update({character: 4 + i for i, character in enumerate(alphabet)})
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")


def byte_of(character: str) -> int:
    """The byte that a character of the byte-level alphabet stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    code = ord(character)
    return code if code in plain else [b for b in range(256) if b not in plain][code - 256]


def ids(text: str) -> list[int]:
    return [4 + byte for byte in text.encode()]


@torch.no_grad()
def expected(
    model: Any, prompt: Sequence[int], sample: Sample, temperature: float = 1.0, output_ids: torch.Tensor | None = None
) -> np.ndarray[Any, Any]:
    """Log-probabilities of the sampled ids by one plain forward of the whole model."""
    training = model.training
    model.eval()
    sequence = torch.tensor([[*prompt, *sample.ids.tolist()]])
    logits = model(input_ids=sequence, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    model.train(training)
    chosen = torch.tensor(sample.ids.tolist())
    if output_ids is not None:
        logits, chosen = logits[:, output_ids], torch.searchsorted(output_ids, chosen)
    return np.asarray((logits / (temperature or 1.0)).log_softmax(-1).gather(1, chosen[:, None])[:, 0])
