"""The engine's log-probabilities are those of a plain forward of the model, whatever was cached, copied or padded."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from renma.errors import ModelError
from renma.inference import SamplingParams
from renma.inference.local import LocalEngine
from tests.inference.tiny_models import MAKERS, VOCABULARY, expected, make


def numbers(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCABULARY, count).tolist()


async def episode(engine: LocalEngine, model: Any, member: int, start: list[int], turns: int) -> int:
    """Turns that extend each other; checks every log-probability, gives the last prompt's and action's length."""
    prompt = list(start)
    for turn in range(turns):
        params = SamplingParams(max_tokens=3 + (member + turn) % 4, seed=100 * member + turn)
        sample = await engine.sample(prompt, params, key=(member, turn))
        np.testing.assert_allclose(sample.logprobs, expected(model, prompt, sample), atol=1e-4)
        prompt += [*sample.ids.tolist(), *numbers(7 * member + turn, 2 + member % 3)]
    return len(prompt)


@pytest.mark.parametrize("name", MAKERS)
def test_logprobs_equal_a_plain_forward_over_ragged_turns(name: str, tokenizer: Any) -> None:
    # Windows are 10 and 12: prompts of 3 to 30 tokens lie on both sides of them.
    model = make(name)
    engine = LocalEngine(model, tokenizer, slots=3)
    header = numbers(1, 20)
    starts = [header, header + [5, 6, 7, 8, 9] * 2, numbers(2, 3), header, [*header[:15], 9, 9, 9]]

    async def main() -> None:
        await asyncio.gather(*(episode(engine, model, i, start, turns=3) for i, start in enumerate(starts)))

    asyncio.run(main())
    assert engine.stats["reused_positions"] > 60
    assert not engine._policy._whole  # the engine's own head, not the whole model's logits
    assert engine.stats["prompt_positions"] == engine.stats["reused_positions"] + engine.stats["computed_positions"]
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_multi_turn_computes_no_position_twice(name: str, tokenizer: Any) -> None:
    model = make(name)
    engine = LocalEngine(model, tokenizer, slots=2)
    start = numbers(3, 16)
    length = asyncio.run(episode(engine, model, 1, start, turns=5))
    # Each position once, when prefilled or when decoded; but the last action's last token and the observation after it
    # were in no prompt.
    computed = engine.stats["computed_positions"] + engine.stats["busy_slot_rounds"]
    assert computed == length - 1 - 3


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_group_prompt_is_computed_once(name: str, tokenizer: Any) -> None:
    model = make(name)
    engine = LocalEngine(model, tokenizer, slots=4)
    prompt = numbers(4, 23)

    async def main() -> None:
        params = [SamplingParams(max_tokens=6, seed=seed) for seed in range(8)]
        samples = await asyncio.gather(*(engine.sample(prompt, p, key=(p.seed,)) for p in params))
        for sample in samples:
            np.testing.assert_allclose(sample.logprobs, expected(model, prompt, sample), atol=1e-4)
        # With one prompt, the members' first logits are the same: what is drawn from them is not.
        assert len({tuple(sample.ids.tolist()) for sample in samples}) > 1

    asyncio.run(main())
    # Eight members on four slots: the second four share one row, which finds all but the last position cached.
    assert engine.stats["computed_positions"] == len(prompt) + 1


def test_few_shot_header_is_computed_once_beside_different_questions(tokenizer: Any) -> None:
    model = make("qwen3")
    engine = LocalEngine(model, tokenizer, slots=8)
    header = numbers(5, 40)
    prompts = [header + numbers(10 + i // 2, 5 + i) for i in range(6)]

    async def main() -> None:
        params = SamplingParams(max_tokens=4, seed=3)
        samples = await asyncio.gather(*(engine.sample(p, params, key=(i,)) for i, p in enumerate(prompts)))
        for prompt, sample in zip(prompts, samples, strict=True):
            np.testing.assert_allclose(sample.logprobs, expected(model, prompt, sample), atol=1e-4)

    asyncio.run(main())
    assert engine.stats["computed_positions"] <= 40 + sum(5 + i for i in range(6))
    assert engine.stats["prefills"] == 2


def test_a_prompt_longer_than_a_chunk_is_computed_in_pieces(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renma.inference.local.engine.CHUNK", 7)
    model = make("gemma3")
    engine = LocalEngine(model, tokenizer, slots=2)
    asyncio.run(episode(engine, model, 0, numbers(6, 40), turns=2))
    assert engine.stats["prefills"] >= 6


def test_buffers_grow_past_their_first_capacity(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renma.inference.local.cache.FIRST_CAPACITY", 8)
    model = make("llama")
    engine = LocalEngine(model, tokenizer, slots=2)

    async def main() -> None:
        await asyncio.gather(*(episode(engine, model, i, numbers(i, 5), turns=4) for i in range(3)))

    asyncio.run(main())


@pytest.mark.parametrize("name", ["llama", "gemma3-eager-softcap"])
def test_output_ids_restrict_and_normalise(name: str, tokenizer: Any) -> None:
    model = make(name)
    output = torch.tensor([4, 9, 50, 51, 52, 200, 255])
    engine = LocalEngine(model, tokenizer, output_ids=output)
    prompt = numbers(8, 12)

    async def main() -> None:
        for temperature in (1.0, 0.6, 0.0):
            params = SamplingParams(temperature=temperature, max_tokens=20, seed=2)
            sample = await engine.sample(prompt, params)
            assert set(sample.ids.tolist()) <= set(output.tolist())
            np.testing.assert_allclose(sample.logprobs, expected(model, prompt, sample, temperature, output), atol=1e-4)

    asyncio.run(main())


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
def test_lora_model_samples_with_its_adapter(targets: list[str], tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make("llama"), peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.5))
    prompt = numbers(9, 10)
    engine = LocalEngine(model, tokenizer, output_ids=torch.arange(4, 200))

    async def main() -> None:
        for version in range(2):
            sample = await engine.sample(prompt, SamplingParams(max_tokens=12, seed=1))
            np.testing.assert_allclose(
                sample.logprobs, expected(model, prompt, sample, 1.0, torch.arange(4, 200)), atol=1e-4
            )
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(std=2.0)
            await engine.load_weights(version + 1)

    asyncio.run(main())
    assert model.training


def test_dropout_acts_in_the_learner_and_not_here(tokenizer: Any) -> None:
    model = make("gpt2")  # its configuration has dropout 0.1
    engine = LocalEngine(model, tokenizer)
    prompt = numbers(2, 12)
    sample = asyncio.run(engine.sample(prompt, SamplingParams(max_tokens=8, seed=1)))
    np.testing.assert_allclose(sample.logprobs, expected(model, prompt, sample), atol=1e-4)
    row = torch.tensor([prompt])
    assert model.training and not torch.equal(model(row).logits, model(row).logits)


def test_an_unknown_head_is_left_to_the_model(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    plain = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 0.5 + torch.arange(VOCABULARY) / 100
        return output

    monkeypatch.setattr(type(model), "forward", forward)
    output = torch.arange(4, 90)
    engine = LocalEngine(model, tokenizer, output_ids=output)
    prompt = numbers(2, 12)
    sample = asyncio.run(engine.sample(prompt, SamplingParams(max_tokens=8, seed=1)))
    np.testing.assert_allclose(sample.logprobs, expected(model, prompt, sample, 1.0, output), atol=1e-4)


def test_models_that_cannot_be_driven_are_refused(tokenizer: Any) -> None:
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, state_size=2))
    with pytest.raises(ModelError, match="layers of type|attention"):
        LocalEngine(recurrent, tokenizer, context=32)
    with pytest.raises(ModelError, match="context 97 is more than the model's 96"):
        LocalEngine(make("llama"), tokenizer, context=97)
    with pytest.raises(ModelError, match="causal LM"):
        LocalEngine(torch.nn.Linear(2, 2), tokenizer, context=8)
