"""What every engine asks of a request before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from renma.errors import ContextOverflow, ModelError
from renma.inference.base import SamplingParams
from renma.types import Ids


def checked_context(config: Any, context: int | None) -> int:
    """The most tokens of prompt and action: `context`, or what the model's text configuration says where it is None.

    Raises ModelError where neither says it, and for more than the model's positions.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if context is not None and longest is not None and context > longest:
        raise ModelError(f"context {context} is more than the model's {longest} positions: give at most {longest}")
    length = context or longest
    if length is None:
        raise ModelError("the model does not say how long its context is: give the engine a context")
    return length


def checked_prompt(prompt_ids: Sequence[int] | Ids, *, context: int, vocabulary: int) -> NDArray[np.int64]:
    """The prompt [P] as int64.

    Raises ContextOverflow for a prompt of `context` tokens or more, ModelError for an empty one or for ids outside
    0..vocabulary - 1.
    """
    prompt = np.asarray(prompt_ids, np.int64)
    if len(prompt) >= context:
        raise ContextOverflow(
            f"a prompt of {len(prompt)} tokens leaves no room in a context of {context}: shorten it, or end it"
        )
    if not len(prompt):
        raise ModelError("a prompt has no tokens: give it at least one (a beginning-of-text token)")
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        raise ModelError(
            f"a prompt holds token ids {prompt.min()}..{prompt.max()}, outside the model's 0..{vocabulary - 1}: is it "
            "from another tokenizer?"
        )
    return prompt


def check_params(params: SamplingParams) -> None:
    """Raise ModelError for a parameter outside its range."""
    for name, fine, want in (
        ("temperature", params.temperature >= 0, "0 or more"),
        ("top_p", 0 < params.top_p <= 1, "in (0, 1]"),
        ("top_k", params.top_k >= 0, "0 (off) or more"),
        ("min_p", 0 <= params.min_p < 1, "in [0, 1)"),
        ("max_tokens", params.max_tokens >= 1, "1 or more"),
        ("stop_strings", all(params.stop_strings), "not empty"),
    ):
        if not fine:
            raise ModelError(f"sampling parameter {name} is {getattr(params, name)!r}: it must be {want}")
