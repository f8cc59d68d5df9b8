"""What the vllm engine needs of vLLM, wherever it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from renma.inference.base import SamplingParams

MOST_ALLOWED = 1024  # ids that vLLM's second model runner (GPUs) can be told to sample from; its first has no limit


@dataclass(frozen=True, slots=True)
class Settings:
    """How vLLM is started. context: the most tokens of prompt and action. slots: requests decoded at once. dtype: of
    weights and activations, by torch's name. output_ids: the only ids that may be sampled, or None. arguments: more of
    vLLM's own engine arguments, by their Python names. start_seconds: the longest wait for it to be ready.
    """

    context: int
    slots: int = 64
    dtype: str = "float32"
    output_ids: tuple[int, ...] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    start_seconds: float = 900.0

    @property
    def environment(self) -> dict[str, str]:
        """Variables that vLLM is started with where the user has not set them."""
        variables = {"VLLM_NO_USAGE_STATS": "1"}
        if self.output_ids is not None and len(self.output_ids) > MOST_ALLOWED:
            variables["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        return variables

    def engine_arguments(self, model: Path, worker: str) -> dict[str, Any]:
        """vLLM's engine arguments, by their Python names. worker: where vLLM finds the class of worker.py."""
        return {
            "model": str(model),
            "dtype": self.dtype,
            "max_model_len": self.context,
            "max_num_seqs": self.slots,
            # After temperature and allowed ids; nothing else that would change them is ever asked for.
            "logprobs_mode": "processed_logprobs",
            # Else a model's own generation settings (top_k, repetition_penalty) would change what is sampled.
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "worker_extension_cls": worker,
        } | self.arguments


@dataclass(frozen=True, slots=True)
class Part:
    """What one call has sampled: ids [A], logprobs [A], and why it ended ("aborted": by `abort`)."""

    ids: list[int]
    logprobs: list[float]
    reason: Literal["stop", "length", "aborted"]


class Backend(Protocol):
    """One vLLM engine, which holds one policy. Faults that a user can mend are raised as RenmaErrors."""

    async def start(self, folder: Path) -> None:
        """Begin, with the model of a Hugging Face folder; its files are not needed afterwards."""
        ...

    async def generate(self, name: str, prompt: Sequence[int], params: SamplingParams) -> Part:
        """Sample until a stop id or string (the token that completes it stays), or max_tokens.

        name: unique, for `abort`. Cancelling the caller ends the request in vLLM too.
        """
        ...

    async def abort(self, names: Sequence[str]) -> None:
        """End those requests: each `generate` returns what it has. Names of requests not yet there are no error."""
        ...

    async def load(self, folder: Path) -> None:
        """Take the weights in the folder's safetensors files, in place, and forget every cached prefix.

        Called while nothing runs.
        """
        ...

    async def close(self) -> None: ...
