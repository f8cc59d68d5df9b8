"""transformers' `generate` as a peer of benchmarks/sampling.py.

    python benchmarks/peers/hf_sampling.py --model FOLDER --batch 64 < jobs

Batched and padded on the left, with what a user can do about speed without writing an engine: the beginning that all
prompts of a batch share is computed once and its cache repeated (`--plain` leaves that out), and episodes of several
turns keep their cache from turn to turn. A row that is done waits for the longest of its batch, as `generate` has it.
Padding then lies between beginning and question, and after rows that were done: a sliding window counts it, so past
the window's length (512 for Gemma-3-270M) the numbers are a little off; the work is the same.
Log-probabilities are taken from the scores as they pass, so that no table of steps × vocabulary is kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from json_jobs import Sampler, serve
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, LogitsProcessor, PreTrainedModel

PAD = 0


class Recorded(LogitsProcessor):
    """Leaves the allowed tokens their scores, and records the log-probability of each token drawn from them."""

    def __init__(self, allowed: Tensor | None) -> None:
        self.allowed = allowed
        self.logprobs: list[Tensor] = []
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.drawn(input_ids)
        if self.allowed is not None:
            scores = scores + self.allowed
        self._last = scores, scores.logsumexp(-1)
        return scores

    def drawn(self, input_ids: Tensor) -> None:
        """The last column of `input_ids` was drawn from the scores seen before."""
        if self._last is not None:
            scores, total = self._last
            self.logprobs.append(scores.gather(1, input_ids[:, -1:]).squeeze(1) - total)
        self._last = None


def common_length(sequences: list[list[int]]) -> int:
    """How many leading ids all have in common; at least one of each is left over."""
    first, last = min(sequences), max(sequences)
    most = min(len(sequence) for sequence in sequences) - 1
    return next((i for i in range(most) if first[i] != last[i]), most)


class Batch:
    """Episodes that generate together: the padded ids so far, which of them are real, and the cache of all but the
    ids that came since."""

    def __init__(self, model: PreTrainedModel, prompts: list[list[int]], plain: bool) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        shared = 0 if plain or len(prompts) == 1 else common_length(prompts)
        rests = [prompt[shared:] for prompt in prompts]
        width = max(len(rest) for rest in rests)
        header = torch.tensor(prompts[0][:shared], dtype=torch.int64).expand(len(prompts), -1)
        padded = torch.tensor([[PAD] * (width - len(rest)) + rest for rest in rests])
        real = torch.tensor([[0] * (width - len(rest)) + [1] * len(rest) for rest in rests])
        self.ids = torch.cat([header, padded], 1)
        self.mask = torch.cat([torch.ones_like(header), real], 1)
        if shared:
            model(input_ids=header[:1], cache=self.cache, use_cache=True, logits_to_keep=1)
            self.cache.batch_repeat_interleave(len(prompts))

    def generate(self, lengths: list[int], allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, max of lengths] ids and their log-probabilities; what is past a row's length is padding."""
        before = self.ids.shape[1]
        recorded = Recorded(allowed)
        self.ids = self.model.generate(
            input_ids=self.ids,
            attention_mask=self.mask,
            cache=self.cache,
            generation_config=GenerationConfig(
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(lengths),
                pad_token_id=PAD,
                eos_token_id=None,
            ),
            logits_processor=[recorded],
        )
        recorded.drawn(self.ids)
        made = self.ids[:, before:]
        kept = torch.arange(made.shape[1]) < torch.tensor(lengths)[:, None]
        self.mask = torch.cat([self.mask, kept.long()], 1)
        return made, torch.stack(recorded.logprobs, 1).where(kept, torch.zeros(()))

    def observe(self, observations: list[list[int]]) -> None:
        new = torch.tensor(observations)
        self.ids = torch.cat([self.ids, new], 1)
        self.mask = torch.cat([self.mask, torch.ones_like(new)], 1)


def start(arguments: argparse.Namespace) -> Sampler:
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
    # The model's own defaults (a top_k, an end token) would come in where a setting is None.
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    vocabulary = model.get_output_embeddings().weight.shape[0]

    @torch.no_grad()
    def sample(episodes: list[dict[str, Any]], allowed: list[int] | None) -> dict[str, Any]:
        bias = None
        if allowed is not None:
            bias = torch.full((vocabulary,), -torch.inf)
            bias[allowed] = 0.0
        total, sum_of_logprobs = 0, 0.0
        began = time.perf_counter()
        for first in range(0, len(episodes), arguments.batch):
            members = episodes[first : first + arguments.batch]
            batch = Batch(model, [episode["prompt"] for episode in members], arguments.plain)
            for turn in range(len(members[0]["lengths"])):
                lengths = [episode["lengths"][turn] for episode in members]
                logprobs = batch.generate(lengths, bias)[1]
                total += sum(lengths)
                sum_of_logprobs += float(logprobs.sum())
                if turn < len(members[0]["observations"]):
                    batch.observe([episode["observations"][turn] for episode in members])
        return {"seconds": time.perf_counter() - began, "tokens": total, "mean_logprob": sum_of_logprobs / total}

    return sample


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="compute every prompt whole")
    return parser.parse_args()


if __name__ == "__main__":
    given = parsed()
    os.environ["HF_HUB_OFFLINE"] = "1"
    serve(lambda: start(given))
