"""A real byte-level BPE, trained here, and an engine that says what it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from renma.inference.base import Sample, SamplingParams
from renma.types import Ids

TEMPLATES = Path(__file__).parent.parent / "fixtures" / "templates"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
CORPUS = [
    "Question: A farmer has 12 cows and buys 30 more. How many now?\nCall: calc(12+30)\nResult: 42\nAnswer: 42\n",
    'Write each call as JSON. {"name": "calc", "arguments": {"expression": "3*4"}}\nsystem\nuser\nassistant\n',
    "the weather in 東京 is fine, naïve café 🙂\n",
] * 4


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """About 400 entries: merges that cross letters, digits and newlines, special tokens, and added tokens that are
    not special."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=SPECIAL[2:],
    )


@pytest.fixture(scope="session")
def template() -> Callable[[str], str]:
    return lambda name: (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


class ScriptedEngine:
    """Answers request k with script[k], and keeps what it was asked."""

    has_logprobs = True
    version = 3

    def __init__(self, script: Sequence[Sequence[int]], context: int = 4096) -> None:
        self.script = [list(ids) for ids in script]
        self.context = context
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.keys: list[tuple[object, ...]] = []

    async def sample(
        self, prompt_ids: Sequence[int] | Ids, params: SamplingParams, *, key: tuple[object, ...] = ()
    ) -> Sample:
        ids = self.script[len(self.prompts)]
        self.prompts.append([int(i) for i in prompt_ids])
        self.params.append(params)
        self.keys.append(key)
        stop = "stop" if ids and ids[-1] in params.stop_ids else "length"
        return Sample(
            np.array(ids, np.int32),
            np.linspace(-0.5, -1.5, len(ids), dtype=np.float32),
            np.full(len(ids), self.version, np.int32),
            stop,  # type: ignore[arg-type]
        )

    async def load_weights(self, version: int) -> None:
        self.version = version

    def episode_opened(self) -> None: ...

    def episode_closed(self) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedEngine]:
    return ScriptedEngine
