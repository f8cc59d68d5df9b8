"""Int8 weights: right to the last bit of integer sums, and out of the learner's way."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from renma.errors import ModelError
from renma.inference import Sample, SamplingParams
from renma.inference.local import LocalEngine, int8
from renma.inference.local.int8 import Fbgemm, Int8Weights, IntegerMatmul, kernel_for
from renma.learning.lora import apply_lora
from renma.learning.scorer import Scorer
from renma.recipe import LoraSettings
from renma.training.mismatch import INT8_TOLERANCE
from tests.inference.tiny_models import make
from tests.learning.tiny import make_row

KERNELS = [Fbgemm, IntegerMatmul]
PROMPT = [7, 9, 11, 13, 15]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


# ---- the arithmetic


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_largest_sums_are_exact(kernel: Any) -> None:
    """Where a kernel adds in 16 bits, levels one too large would saturate: these are the largest pairs there can be."""
    levels = kernel.levels
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (24, 64), generator=generator) * 2 - 1
    steps = torch.cat([torch.full((1, 64), levels), signs[:8] * levels, torch.randint(-levels, levels + 1, (3, 64))])
    values = torch.cat([torch.full((1, 64), levels), signs[8:] * levels]).to(torch.int8)
    found = kernel().product(steps.float(), kernel().pack(values, torch.ones(len(values))))
    assert torch.equal(found.long(), steps.long() @ values.long().T)


@settings(deadline=None, max_examples=25)
@given(
    inputs=st.sampled_from([8, 24, 32, 96, 640]),
    outputs=st.integers(1, 40),
    rows=st.integers(1, 40),
    kernel=st.sampled_from(KERNELS),
    outlier=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_is_near_the_float_one_and_that_of_any_other_batch(
    inputs: int, outputs: int, rows: int, kernel: Any, outlier: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    weights = holding(weight, kernel())
    x = torch.randn(rows, inputs, generator=generator)
    if outlier:
        x[:, 3] *= 30.0  # one channel far above the others, as language models have them
    with torch.no_grad():
        whole = weights.logits(x)
        # The turn changes nothing; then every entry is off by half a step of its row at most.
        turned, matrix = int8._turned(x), int8._turned(weight)
        torch.testing.assert_close(turned @ matrix.T, x @ weight.T, atol=2e-4, rtol=1e-4)
        step, unit = turned.abs().amax(1, True) / kernel.levels, matrix.abs().amax(1) / kernel.levels
        bound = turned.abs().sum(1, True) * unit / 2 + matrix.abs().sum(1) * step / 2 + inputs * step * unit / 4
        assert ((whole - x @ weight.T).abs() <= bound + 1e-3).all()
        # Sums of whole numbers are exact; the last bit of a turn may tip a rounding, by one step.
        steps, packed = turned / step, weights._head.packed  # type: ignore[union-attr]
        for row in (0, rows - 1):
            one = slice(row, row + 1)
            assert torch.equal(weights.kernel.product(steps[one], packed), weights.kernel.product(steps, packed)[one])
            assert ((weights.logits(x[one]) - whole[one]).abs() <= step[one] * matrix.abs().amax(1) + 1e-3).all()


class Head(nn.Module):
    """As much of a model as a head needs."""

    device = torch.device("cpu")

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 1), nn.Linear(weight.shape[1], len(weight), bias=False)
        self.head.weight = nn.Parameter(weight)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def holding(weight: torch.Tensor, kernel: Any) -> Int8Weights:
    """Int8 weights whose head is `weight`."""
    return Int8Weights(Head(weight), kernel=kernel)


def test_turning_spreads_an_outlier_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 640), torch.randn(16, 640)
    x[:, 3] *= 60.0
    errors = {}
    for block in (32, 1):
        monkeypatch.setattr(int8, "BLOCK", block)
        weights = holding(weight, Fbgemm())
        with torch.no_grad():
            # What the outlier itself contributes is right either way; the other channels are what is drowned.
            errors[block] = float((weights.logits(x) - x @ weight.T).norm())
    assert errors[32] < errors[1] / 3


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_finite_stays_so(kernel: Any) -> None:
    weight = torch.randn(16, 32)
    x = torch.randn(3, 32)
    x[1, 5] = float("nan")
    with torch.no_grad():
        assert holding(weight, kernel()).logits(x).isnan().all(1).tolist() == [False, True, False]
        weight[4, 7] = float("nan")
        assert holding(weight, kernel()).logits(x[:1]).isnan()[0].nonzero().tolist() == [[4]]


def test_a_device_without_fast_products_is_refused() -> None:
    with pytest.raises(ModelError, match="int8 needs an x86 CPU .* this device .mps. has neither"):
        kernel_for(torch.device("mps"))


# ---- out of the learner's way


@torch.no_grad()
def outputs(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "mixtral", "granite"])
def test_the_module_is_changed_inside_alone(name: str) -> None:
    model = make(name).eval()
    before, names = outputs(model), list(model.state_dict())
    weights = Int8Weights(model)
    with pytest.raises(KeyError), weights.sampling():
        inside = outputs(model)
        raise KeyError
    assert 0.001 < off(inside, before) < 0.1
    assert torch.equal(outputs(model), before)
    assert list(model.state_dict()) == names
    assert not any("forward" in vars(module) for module in model.modules())
    assert weights.nbytes < 1.2 * weights.parameters


def test_a_forward_that_a_module_has_of_its_own_is_put_back() -> None:
    model: Any = make("llama").eval()
    plain = model.model.layers[0].mlp.up_proj
    own = plain.forward = lambda x: nn.functional.linear(x, 2 * plain.weight)
    before = outputs(model)
    with Int8Weights(model).sampling():
        assert plain.forward is not own
    assert plain.forward is own and torch.equal(outputs(model), before)


def test_the_gradient_is_the_float_one_between_and_after_samples(tokenizer: Any) -> None:
    def gradient(model: Any) -> list[torch.Tensor]:
        model.zero_grad()
        model(torch.tensor([PROMPT]), use_cache=False).logits.log_softmax(-1)[0, :, 5].sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    model: Any = make("llama")
    alone = gradient(model)
    engine = LocalEngine(model, tokenizer, weights="int8")
    asyncio.run(engine.sample(PROMPT, SamplingParams(max_tokens=4)))
    assert all(torch.equal(a, b) for a, b in zip(gradient(model), alone, strict=True))
    twin = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(gradient(twin), alone, strict=True))


def test_weights_are_rounded_anew_with_each_version(tokenizer: Any) -> None:
    model: Any = make("llama")
    engine = LocalEngine(model, tokenizer, weights="int8")
    params = SamplingParams(temperature=0.0, max_tokens=6)

    async def main() -> tuple[Sample, Sample]:
        with torch.no_grad():
            for parameter in make("llama", seed=1).named_parameters():
                model.get_parameter(parameter[0]).copy_(parameter[1])
        await engine.load_weights(1)
        return await engine.sample(PROMPT, params), await fresh.sample(PROMPT, params)

    fresh = LocalEngine(make("llama", seed=1), tokenizer, weights="int8")
    changed, wanted = asyncio.run(main())
    assert changed.ids.tolist() == wanted.ids.tolist()
    assert changed.logprobs.tolist() == wanted.logprobs.tolist()


def test_adapters_stay_in_float_and_their_bases_are_rounded_once() -> None:
    model: Any = apply_lora(make("llama"), LoraSettings(rank=2)).eval()
    weights = Int8Weights(model)
    packed = [layer.packed for layer in weights._layers]
    assert len(packed) == 14  # seven projections in two layers; none of the adapters'
    first = outputs(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    weights.refresh()
    assert all(a is layer.packed for a, layer in zip(packed, weights._layers, strict=True))
    moved = outputs(model)
    with weights.sampling():
        assert off(outputs(model), moved) < 0.1 < off(moved, first)
    with torch.no_grad():
        weights._layers[0].linear.weight.mul_(0.5)  # somebody loads another base
    weights.refresh()
    assert [a is layer.packed for a, layer in zip(packed, weights._layers, strict=True)] == [False] + [True] * 13


# ---- the engine


def test_the_recorded_logprobs_are_the_int8_policys(tokenizer: Any) -> None:
    model: Any = make("qwen3")
    engine = LocalEngine(model, tokenizer, slots=4, weights="int8")

    async def main() -> list[Sample]:
        prompts = [[*PROMPT, *range(20, 20 + n)] for n in range(8)]
        params = [SamplingParams(max_tokens=8, seed=n) for n in range(8)]
        return await asyncio.gather(*(engine.sample(p, s, key=(s.seed,)) for p, s in zip(prompts, params, strict=True)))

    samples = asyncio.run(main())
    weights = Int8Weights(model, head=True)
    to_own, to_float = [], []
    for n, sample in enumerate(samples):
        ids = torch.tensor([[*PROMPT, *range(20, 20 + n), *sample.ids.tolist()]])
        at = torch.tensor(sample.ids.tolist())[:, None]
        start = len(PROMPT) + n - 1
        model.eval()
        with torch.no_grad():
            plain = model(ids, use_cache=False).logits[0, start:-1]
            with weights.sampling():
                hidden = model.model(ids, use_cache=False).last_hidden_state[0, start:-1]
                rounded = weights.logits(hidden)
        for logits, gaps in ((rounded, to_own), (plain, to_float)):
            gaps.append(np.abs(logits.log_softmax(-1).gather(1, at)[:, 0].numpy() - sample.logprobs))
    own, other = np.concatenate(to_own).mean(), np.concatenate(to_float).mean()
    # Not equal: a last bit of attention can tip a rounding.
    assert own < other / 4 and 0.005 < other < 0.2


def test_a_policy_that_has_diverged_is_not_sampled_from(tokenizer: Any) -> None:
    model: Any = make("llama")
    engine = LocalEngine(model, tokenizer, weights="int8")

    async def main() -> None:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[3, 3] = float("nan")
        await engine.load_weights(1)
        with pytest.raises(ModelError, match="finite"):
            await engine.sample(PROMPT, SamplingParams(max_tokens=3))

    asyncio.run(main())


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("mixtral", torch.float32)])
def test_bfloat16_models_and_mixtures_are_sampled_too(name: str, dtype: torch.dtype, tokenizer: Any) -> None:
    model = make(name).to(dtype)
    engine = LocalEngine(model, tokenizer, weights="int8", record_routing=name == "mixtral")
    sample = asyncio.run(engine.sample(PROMPT, SamplingParams(max_tokens=12, seed=1)))
    ids = [*PROMPT, *sample.ids.tolist()]
    row = make_row(ids, [0] * len(PROMPT) + [1] * len(sample.ids), logprob=sample.logprobs.tolist())
    routed = replace(row, routing=sample.routing)
    assert 0 < np.abs(Scorer(model).logprobs([routed])[0] - sample.logprobs).mean() < INT8_TOLERANCE / 2


def test_a_model_without_linear_layers_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ModelError, match="no linear layer in GPT2LMHeadModel"):
        LocalEngine(make("gpt2"), tokenizer, weights="int8")


def test_a_head_with_an_adapter_stays_in_float(tokenizer: Any) -> None:
    model = apply_lora(make("llama"), LoraSettings(rank=2, targets=["lm_head", "q_proj"]))
    assert not Int8Weights(model).has_head
    engine = LocalEngine(model, tokenizer, weights="int8")
    assert len(asyncio.run(engine.sample(PROMPT, SamplingParams(max_tokens=3))).ids) == 3


def test_other_names_of_weights_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ModelError, match="own or int8, not 'int4'"):
        LocalEngine(make("llama"), tokenizer, weights="int4")  # type: ignore[arg-type]
