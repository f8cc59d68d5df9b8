"""Tiny causal models of several architectures, and rows and trajectories at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from renma.learning.rows import Row
from renma.types import Action, Step, Task, Trajectory

VOCABULARY = 48
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large enough that every token depends on every other
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "llama_tied": lambda: LlamaConfig(**COMMON, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**COMMON),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON, layer_types=["sliding_attention", "full_attention"], sliding_window=4, final_logit_softcapping=5.0
    ),
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
}


@cache
def _made(kind: str, attention: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=attention).eval()


def make_model(kind: str = "llama", attention: str = "sdpa") -> Any:
    """A fresh model, the same weights every time."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=attention).eval()
    model.load_state_dict(_made(kind, attention).state_dict())
    return model


def make_row(
    ids: Sequence[int],
    trained: Sequence[int],
    *,
    trajectory: int = 0,
    group: int = -1,
    advantage: float | Sequence[float] = 1.0,
    logprob: float | Sequence[float] = -1.0,
    step: int = 0,
    version: int = 0,
) -> Row:
    """A row with the same advantage and log-probability at each trained token, or one for each of them."""
    mask = np.array(trained, np.bool_)

    def fill(value: Any, empty: float, kind: type) -> Any:
        array = np.full(len(ids), empty, kind)
        array[mask] = value
        return array

    return Row(
        np.array(ids, np.int32),
        mask,
        fill(logprob, 0, np.float32),
        fill(advantage, 0, np.float32),
        fill(step, -1, np.int32),
        fill(version, -1, np.int32),
        trajectory,
        group,
    )


def random_rows(
    seed: int, count: int = 8, low: int = 3, high: int = 14, symbols: int = 5, groups: int = 0
) -> list[Row]:
    """Rows that share beginnings of random lengths, with tokens from a few symbols, trained here and there."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for number in range(count):
        length = int(rng.integers(low, high))
        ids = rng.integers(0, symbols, length)
        if rows and rng.random() < 0.8:
            other = rows[int(rng.integers(len(rows)))].ids
            kept = int(rng.integers(0, min(length, len(other)) + 1))
            ids[:kept] = other[:kept]
        trained = rng.random(length) < 0.5
        trained[0] = False
        trained[-1] = True
        n = int(trained.sum())
        rows.append(
            make_row(
                ids,
                trained,
                trajectory=number,
                group=number % groups if groups else -1,
                advantage=rng.normal(size=n),
                logprob=-rng.random(n) * 3,
                step=0,
            )
        )
    return rows


def make_trajectory(
    turns: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    status: Any = "done",
    stop_reason: Any = "answer",
    logprobs: Sequence[Sequence[float]] | None = None,
    sample_stop: Any = "stop",
) -> Trajectory:
    """A trajectory of (prompt ids, action ids); the log-probability of the i-th sampled token is -(i + 1) / 10."""
    steps = []
    count = 0
    for number, (prompt, action) in enumerate(turns):
        values = -(np.arange(count, count + len(action)) + 1) / 10 if logprobs is None else logprobs[number]
        count += len(action)
        steps.append(
            Step(
                np.array(prompt, np.int32),
                np.array(action, np.int32),
                np.array(values, np.float32),
                np.full(len(action), number + 3, np.int32),
                Action(""),
                sample_stop=sample_stop,
            )
        )
    return Trajectory(Task("t1", "?"), 0, tuple(steps), status, stop_reason)


def separate_logprobs(model: Any, row: Row, temperature: float = 1.0, output_ids: Any = None) -> Any:
    """log pi of a row's trained tokens the plain way: the whole model on the row alone. Differentiable."""
    ids = torch.from_numpy(row.ids.astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0] / temperature
    if output_ids is not None:
        hidden = torch.full((logits.shape[-1],), -torch.inf, dtype=logits.dtype)
        hidden[output_ids] = 0
        logits = logits + hidden
    at = torch.from_numpy(np.flatnonzero(row.trained))
    return logits.log_softmax(-1)[at - 1, ids[at]]
