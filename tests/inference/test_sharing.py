"""Requests with the same tokens so far are computed once, and each gets what it would get alone."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from renma.inference import Sample, SamplingParams
from renma.inference.local import LocalEngine
from renma.inference.local.policy import SlotPolicy
from tests.inference.tiny_models import expected, ids, make

PROMPT = ids("Question: 1+1 Answer: 2 Question: 12+30 Answer:")


def sample_all(engine: LocalEngine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Sample]:
    async def main() -> list[Sample]:
        return await asyncio.gather(
            *(engine.sample(p, how, key=(n,)) for n, (p, how) in enumerate(zip(prompts, params, strict=True)))
        )

    return asyncio.run(main())


def distinct(prompts: list[list[int]], samples: list[Sample]) -> int:
    """How many sequences a token was drawn after, but for the prompts themselves, whose logits the prefill gives."""
    return len(
        {
            tuple(prompt + sample.ids[:count].tolist())
            for prompt, sample in zip(prompts, samples, strict=True)
            for count in range(1, len(sample.ids))
        }
    )


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "mistral-window", "gpt2"])
def test_members_of_a_group_sample_what_they_would_alone(name: str, tokenizer: Any) -> None:
    model = make(name)
    params = [SamplingParams(temperature=0.05, max_tokens=14, seed=seed) for seed in range(12)]
    prompts = [PROMPT] * 8 + [[7, *PROMPT]] * 4
    together = LocalEngine(model, tokenizer, slots=12)
    samples = sample_all(together, prompts, params)
    alone = LocalEngine(model, tokenizer, slots=1)
    for sample, other in zip(samples, sample_all(alone, prompts, params), strict=True):
        assert sample.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(sample.logprobs, other.logprobs, atol=1e-4)
    shared = distinct(prompts, samples)
    assert together.stats["decoded_positions"] == shared
    assert shared < together.stats["sampled_tokens"] - 12  # the low temperature makes members write the same words
    assert together.stats["computed_positions"] == len(PROMPT) + len(PROMPT) + 1


def test_one_line_of_logits_drawn_in_different_ways(tokenizer: Any) -> None:
    model = make("llama")
    ways = [
        SamplingParams(temperature=0.0, max_tokens=6),
        SamplingParams(temperature=0.5, max_tokens=6, seed=1),
        SamplingParams(temperature=2.0, max_tokens=6, seed=2),
        SamplingParams(temperature=1.0, top_k=1, max_tokens=6, seed=3),
        SamplingParams(temperature=1.0, top_p=0.2, max_tokens=6, seed=4),
        SamplingParams(temperature=1.0, min_p=0.9, max_tokens=6, seed=5),
    ]
    engine = LocalEngine(model, tokenizer, slots=8)
    samples = sample_all(engine, [PROMPT] * len(ways), ways)
    for sample, way in zip(samples, ways, strict=True):
        np.testing.assert_allclose(sample.logprobs, expected(model, PROMPT, sample, way.temperature or 1.0), atol=1e-4)
    assert samples[0].ids.tolist() == samples[3].ids.tolist()  # the likeliest of one is the likeliest


def test_new_weights_reach_requests_that_share_a_row(tokenizer: Any) -> None:
    model = make("llama")
    engine = LocalEngine(model, tokenizer, slots=6)

    async def main() -> list[Sample]:
        greedy = [SamplingParams(temperature=0.0, max_tokens=12)] * 6
        tasks = [asyncio.create_task(engine.sample(PROMPT, way, key=(n,))) for n, way in enumerate(greedy)]
        for _ in range(6):
            await asyncio.sleep(0)
        assert engine._sequences.running == 1 and engine._slots.busy == 6
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        await engine.load_weights(1)
        return list(await asyncio.gather(*tasks))

    samples = asyncio.run(main())
    for sample in samples:
        assert sample.ids.tolist() == samples[0].ids.tolist()
        assert set(sample.versions.tolist()) == {0, 1}
        new = sample.versions == 1
        np.testing.assert_allclose(sample.logprobs[new], expected(model, PROMPT, sample)[new], atol=1e-4)


def test_one_that_shares_is_cancelled_and_the_others_go_on(tokenizer: Any) -> None:
    model = make("llama")
    engine = LocalEngine(model, tokenizer, slots=3)

    async def main() -> list[Sample]:
        way = SamplingParams(temperature=0.0, max_tokens=8)
        tasks = [asyncio.create_task(engine.sample(PROMPT, way, key=(n,))) for n in range(3)]
        for _ in range(4):
            await asyncio.sleep(0)
        tasks[0].cancel()
        done = await asyncio.gather(*tasks[1:])
        assert tasks[0].cancelled() or tasks[0].cancelling()
        return list(done)

    for sample in asyncio.run(main()):
        np.testing.assert_allclose(sample.logprobs, expected(model, PROMPT, sample), atol=1e-4)
    assert engine._sequences.running == engine._slots.busy == 0


def test_rows_that_nobody_needs_are_not_allocated(tokenizer: Any) -> None:
    engine = LocalEngine(make("llama"), tokenizer, slots=64)
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    sample_all(engine, [PROMPT] * 64, [greedy] * 64)
    assert engine._policy.cache.rows == 16
    flat = [SamplingParams(temperature=50.0, max_tokens=6, seed=seed) for seed in range(64)]
    samples = sample_all(engine, [PROMPT] * 64, flat)
    assert engine._policy.cache.rows == 64
    # The greedy tokens, the rest of the prompt that was cached, and each sequence once.
    assert engine.stats["decoded_positions"] == 5 + 1 + distinct([PROMPT] * 64, samples)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gemma3-eager-softcap", "mistral-window"])
@pytest.mark.parametrize("shared", [0, 1, 33, 40])
def test_the_decoder_gives_what_the_model_gives(name: str, shared: int) -> None:
    policy = SlotPolicy(make(name), 5, 96, None)
    assert policy._decoder is not None
    rng = np.random.default_rng(shared)
    tokens = rng.integers(0, 260, (5, 96), dtype=np.int32)
    tokens[:, :shared] = tokens[0, :shared]
    last = np.array([48, 41, 60, 44, 57])
    found = []
    for decoder in (None, policy._decoder):
        with policy.sampling():
            policy.prefill([0, 1, 2, 3, 4], [0] * 5, last.tolist(), tokens)
            steps = [policy._decoded(decoder, tokens[range(5), last + n], last + n, shared) for n in range(3)]
        found.append(torch.stack(steps))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)


def test_models_that_the_decoder_does_not_know_run_their_own_way() -> None:
    for name in ("gpt2", "granite", "mixtral"):
        assert SlotPolicy(make(name), 2, 96, None)._decoder is None


def test_a_decoder_that_is_wrong_for_a_model_is_not_used() -> None:
    model = make("llama")
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2  # what the decoder reads ...
        layer.self_attn.forward = doubled(layer.self_attn)  # ... is not what the model then does
    assert SlotPolicy(model, 2, 96, None)._decoder is None


def doubled(attention: Any) -> Any:
    plain = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output, weights = plain(*args, **kwargs)
        return output * 1.5, weights

    return forward
