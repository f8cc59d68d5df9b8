"""The dtype policy: matrix products in the compute type, masters, softmax and log-probabilities in float32; and how far
sampler and learner, which compute the same by different ways, then are apart.

Stated tolerances, mean |log pi_learner - log mu| over sampled tokens: bfloat16 0.05 nats, which is what
`training.mismatch_tolerance` allows (measured here: 0.004); float32 1e-5 for every token (1e-6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from renma.inference import Sample, SamplingParams
from renma.inference.local import LocalEngine
from renma.learning.learner import Learner
from renma.learning.logprobs import token_logprobs
from renma.learning.losses import reinforce
from renma.learning.rows import Row
from renma.learning.scorer import Scorer
from renma.learning.statistics import Mismatch
from renma.recipe import LearnerSection
from renma.training.mismatch import TOLERANCE
from tests.inference.tiny_models import MAKERS, VOCABULARY
from tests.learning.tiny import make_row

BFLOAT16 = torch.bfloat16
MODELS = ["llama", "qwen3", "gemma3", "gemma3-eager-softcap", "granite"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def policy(name: str, dtype: torch.dtype) -> Any:
    """Weights that make distributions neither flat nor certain, as a language model's are."""
    torch.manual_seed(0)
    model = MAKERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model.to(dtype)


def prompts(count: int) -> list[list[int]]:
    """Ragged, some of which share a beginning longer than the windows."""
    rng = np.random.default_rng(0)
    header = rng.integers(4, VOCABULARY, 36).tolist()
    return [[*(header if n % 3 else []), *rng.integers(4, VOCABULARY, 1 + (5 * n) % 11).tolist()] for n in range(count)]


def sampled(engine: LocalEngine, asked: Sequence[list[int]], temperature: float = 1.0, turns: int = 2) -> list[Row]:
    """One row an episode of `turns` actions, all episodes at once; the next turn goes on from the last."""

    async def episode(number: int, prompt: list[int]) -> Row:
        ids, trained, logprobs = list(prompt), [0] * len(prompt), []
        for turn in range(turns):
            params = SamplingParams(temperature=temperature, max_tokens=6 + number % 5, seed=10 * number + turn)
            sample: Sample = await engine.sample(ids, params, key=(number, turn))
            ids += [*sample.ids.tolist(), 5, 6]
            trained += [1] * len(sample.ids) + [0, 0]
            logprobs += sample.logprobs.tolist()
        return make_row(ids, trained, trajectory=number, logprob=logprobs)

    async def main() -> list[Row]:
        return await asyncio.gather(*(episode(n, prompt) for n, prompt in enumerate(asked)))

    return asyncio.run(main())


def gaps(model: Any, rows: Sequence[Row], temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """log pi of the learner - log mu of the engine, of every sampled token."""
    learned = Scorer(model, temperature=temperature).logprobs(rows)
    return np.concatenate([ours - row.logprobs[row.trained] for ours, row in zip(learned, rows, strict=True)])


# ---- how far apart


@pytest.mark.parametrize("temperature", [1.0, 0.0], ids=["T1", "greedy"])
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_samples_stay_within_the_stated_tolerance(name: str, temperature: float, tokenizer: Any) -> None:
    model = policy(name, BFLOAT16)
    rows = sampled(LocalEngine(model, tokenizer, slots=8), prompts(12), temperature)
    off = gaps(model, rows, temperature)
    assert 0 < np.abs(off).mean() < TOLERANCE
    mismatch = Mismatch()
    mismatch.add(off)
    numbers = mismatch.result()
    assert numbers["mismatch_mean"] == pytest.approx(np.abs(off).mean())
    assert numbers["effective_sample_size"] > 0.98 and numbers["mismatch_outside_share"] == 0


def test_the_tolerance_holds_whatever_shares_the_batch(tokenizer: Any) -> None:
    """Alone, in threes and all together: each is near the learner, and nearly the same tokens are drawn."""
    model = policy("gemma3", BFLOAT16)
    firsts = []
    for slots in (1, 3, 16):
        rows = sampled(LocalEngine(model, tokenizer, slots=slots), prompts(10), turns=1)
        assert 0 < np.abs(gaps(model, rows)).mean() < TOLERANCE
        firsts.append([int(row.ids[row.trained][0]) for row in rows])
    for other in firsts[1:]:
        assert sum(a == b for a, b in zip(firsts[0], other, strict=True)) >= 8


@pytest.mark.parametrize("temperature", [1.0, 0.0], ids=["T1", "greedy"])
@pytest.mark.parametrize("name", MODELS)
def test_float32_samples_are_the_learners_to_rounding(name: str, temperature: float, tokenizer: Any) -> None:
    model = policy(name, torch.float32)
    off = np.abs(gaps(model, sampled(LocalEngine(model, tokenizer, slots=5), prompts(12), temperature), temperature))
    assert off.max() < 1e-5


def test_another_temperature_or_other_weights_are_outside_the_tolerance(tokenizer: Any) -> None:
    """What the tolerance is for: a mistake shows, in bfloat16 too."""
    model = policy("llama", BFLOAT16)
    rows = sampled(LocalEngine(model, tokenizer), prompts(12))
    assert np.abs(gaps(model, rows, temperature=0.6)).mean() > 2 * TOLERANCE
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.neg_()
    assert np.abs(gaps(model, rows)).mean() > 2 * TOLERANCE


# ---- float32 where it matters


def test_the_engines_softmax_is_in_float32(tokenizer: Any) -> None:
    """The steps of a bfloat16 log-probability near -5 are 1/32: more than sampler and learner differ by."""
    model = policy("llama", BFLOAT16)
    [row] = sampled(LocalEngine(model, tokenizer), prompts(1), turns=1)
    at = np.flatnonzero(row.trained)
    ids = row.ids[: at[-1] + 1].tolist()
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, at - 1]
        logits = hidden @ model.lm_head.weight.T
    exact = logits.float().log_softmax(-1)[range(len(at)), ids[at[0] :]].numpy()
    coarse = logits.log_softmax(-1)[range(len(at)), ids[at[0] :]].float().numpy()
    found = row.logprobs[at]
    assert np.abs(found - exact).mean() < np.abs(coarse - exact).mean()
    assert not np.array_equal(torch.from_numpy(found).to(BFLOAT16).float().numpy(), found)


def test_the_learners_log_softmax_is_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 32).to(BFLOAT16), torch.randn(VOCABULARY, 32).to(BFLOAT16)
    targets = torch.arange(7) * 30
    logp, entropy = token_logprobs(hidden, weight, targets)
    assert logp.dtype == entropy.dtype == torch.float32
    exact = (weight @ hidden.T).T.float().log_softmax(-1)
    torch.testing.assert_close(logp, exact[range(7), targets], atol=1e-5, rtol=1e-6)


def test_masters_and_moments_are_float32_and_keep_what_bfloat16_would_lose() -> None:
    """Updates of a hundredth of a bfloat16 step and less: 40 of them move the master by 40, and its copy follows."""
    model = policy("llama", torch.float32)
    rate = 2e-6  # a bfloat16 weight of 0.1 has steps of 0.0005
    learner = Learner(model, LearnerSection(learning_rate=rate, clip_norm=None), compute_dtype=BFLOAT16)
    assert all(p.dtype == BFLOAT16 for p in model.parameters())
    optimizer = learner.optimizer
    assert {m.dtype for m in optimizer.masters.values()} == {torch.float32}
    before = {name: master.detach().clone() for name, master in optimizer.masters.items()}
    row = make_row([7, 8, 9, 10, 11], [0, 0, 1, 1, 1])
    steps = 40
    for _ in range(steps):
        learner.update([row], loss=reinforce())
    moments = [state[key] for state in optimizer.inner.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert {m.dtype for m in moments} == {torch.float32}
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (optimizer.masters[name] - before[name]).abs()
    # Adam moves a weight whose gradient keeps its sign by the rate each time.
    assert float(moved.median()) == pytest.approx(steps * rate, rel=0.2)
    # One such step is lost on a bfloat16 weight of the usual size, so 40 of them would be too.
    weight = before[name].to(BFLOAT16)
    assert float(((weight + rate) == weight).float().mean()) > 0.95
    assert torch.equal(model.get_parameter(name), optimizer.masters[name].to(BFLOAT16))
