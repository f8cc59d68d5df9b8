"""The engine's record of the experts chosen at each position."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM, PreTrainedTokenizerFast

from renma.errors import ModelError
from renma.inference import Sample, SamplingParams
from renma.inference.local import LocalEngine
from renma.models.experts import Routers
from tests.inference.tiny_mixtures import CHOSEN, KINDS, LAYERS, make, plain_routing
from tests.inference.tiny_models import SIZES, expected, ids
from tests.inference.tiny_models import make as make_dense


def assert_recorded(model: Any, prompt: list[int], sample: Sample) -> None:
    """The routes are those of a plain forward over the sequence, and the last token has none."""
    sequence = [*prompt, *sample.ids.tolist()]
    assert sample.routing is not None
    assert sample.routing.dtype == np.int16
    assert sample.routing.shape == (len(sequence), LAYERS, CHOSEN)
    np.testing.assert_array_equal(sample.routing[:-1], plain_routing(model, sequence)[:-1])
    assert (sample.routing[-1] == -1).all()


async def group(engine: LocalEngine) -> list[tuple[list[int], Sample]]:
    """Two turns of six episodes: equal prompts, shared beginnings, and more episodes than slots."""
    header = ids("the same few words come first, ")
    starts = [header + ids(text) for text in ("one", "one", "two", "three", "one", "two?")]

    async def episode(member: int) -> list[tuple[list[int], Sample]]:
        prompt, turns = starts[member], []
        for turn in range(2):
            params = SamplingParams(max_tokens=5 + member, seed=10 * member + turn)
            sample = await engine.sample(prompt, params, key=(member, turn))
            turns.append((prompt, sample))
            prompt = [*prompt, *sample.ids.tolist(), *ids(" so")]
        return turns

    return [turn for turns in await asyncio.gather(*map(episode, range(len(starts)))) for turn in turns]


@pytest.mark.parametrize("kind", KINDS)
def test_routes_are_recorded_through_prefixes_copies_and_turns(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = make(kind)
    engine = LocalEngine(model, tokenizer, slots=4, record_routing=True)
    silent = LocalEngine(model, tokenizer, slots=4)
    turns, same = asyncio.run(group(engine)), asyncio.run(group(silent))
    assert engine.stats["reused_positions"] > engine.stats["computed_positions"]
    routes = np.concatenate([sample.routing for _, sample in turns if sample.routing is not None])
    assert len(np.unique(routes, axis=0)) > 4
    for (prompt, sample), (_, other) in zip(turns, same, strict=True):
        assert_recorded(model, prompt, sample)
        np.testing.assert_allclose(sample.logprobs, expected(model, prompt, sample), atol=1e-4)
        # Recording changes nothing of what is sampled.
        assert other.routing is None
        np.testing.assert_array_equal(sample.ids, other.ids)
        np.testing.assert_array_equal(sample.logprobs, other.logprobs)


def test_routes_grow_with_the_buffers_and_are_given_back(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make("mixtral")
    model.config.max_position_embeddings = 700
    engine = LocalEngine(model, tokenizer, slots=2, record_routing=True)
    prompt = ids("a long way to go " * 12)

    async def run() -> None:
        first = await engine.sample(prompt, SamplingParams(max_tokens=8, seed=1))
        longer = [*prompt, *first.ids.tolist(), *ids("and more " * 30)]
        assert len(prompt) < 256 < len(longer)
        assert_recorded(model, prompt, first)
        assert_recorded(model, longer, await engine.sample(longer, SamplingParams(max_tokens=3)))
        await engine.close()

    asyncio.run(run())
    assert engine.stats["reused_positions"] >= len(prompt)
    assert engine._policy.cache.routes is None


def test_a_request_that_goes_on_under_new_weights_has_their_routes(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make("qwen3-moe")
    engine = LocalEngine(model, tokenizer, record_routing=True)
    before = plain_routing(model, ids("changing"))

    async def run() -> Sample:
        waiting = asyncio.ensure_future(engine.sample(ids("changing"), SamplingParams(max_tokens=12)))
        while engine.stats["sampled_tokens"] < 4:
            await asyncio.sleep(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.flip(0))
        await engine.load_weights(1)
        return await waiting

    sample = asyncio.run(run())
    assert sample.versions.tolist() == [0] * 4 + [1] * 8
    assert_recorded(model, ids("changing"), sample)
    assert (before != plain_routing(model, ids("changing"))).any()


def test_an_aborted_request_has_the_routes_of_what_ran(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make("gpt-oss")
    engine = LocalEngine(model, tokenizer, record_routing=True)

    async def run() -> Sample:
        waiting = asyncio.ensure_future(engine.sample(ids("cut"), SamplingParams(max_tokens=40)))
        while engine.stats["sampled_tokens"] < 3:
            await asyncio.sleep(0)
        await engine.close()
        return await waiting

    sample = asyncio.run(run())
    assert sample.stop_reason == "aborted"
    assert_recorded(model, ids("cut"), sample)


def test_a_dense_model_records_nothing_and_has_no_hooks(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_dense("llama")
    engine = LocalEngine(model, tokenizer, record_routing=True)
    assert Routers.of(model) is None
    assert asyncio.run(engine.sample(ids("plain"), SamplingParams(max_tokens=3))).routing is None
    assert engine._policy.cache.routes is None


def test_unknown_routers_are_named_when_they_are_to_be_recorded(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    model = GraniteMoeForCausalLM(GraniteMoeConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))
    with pytest.raises(ModelError, match="GraniteMoeTopKRouter.*known routers: Mixtral"):
        LocalEngine(model, tokenizer, record_routing=True)
    sample = asyncio.run(LocalEngine(model, tokenizer).sample(ids("fine"), SamplingParams(max_tokens=3)))
    assert sample.routing is None
    assert len(sample.ids) == 3


def test_no_hook_is_left_after_a_failure(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make("mixtral")
    routers = Routers.of(model)
    assert routers is not None
    with (
        pytest.raises(RuntimeError, match="0 routers ran in one forward of a model that has 2"),
        routers.recording() as got,
    ):
        got()
    assert not any(module._forward_hooks for module in model.modules())
