"""Training on int8 samples: the expected gradient, the tolerance of the first batch, the recipes that are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from renma.errors import RecipeError, RunError
from renma.inference import Sample, SamplingParams
from renma.inference.local import LocalEngine, int8
from renma.inference.local.int8 import Fbgemm
from renma.learning.correction import Correction, sequence_tis, token_tis
from renma.learning.learner import Learner
from renma.learning.losses import ppo_clip
from renma.learning.rows import Row
from renma.learning.scorer import Scorer
from renma.recipe import LearnerSection, Recipe
from renma.recipe_checks import check_recipe
from renma.recipe_load import load_recipe
from renma.training.algorithms import resolve
from renma.training.loop import Loop
from renma.training.mismatch import INT8_TOLERANCE, TOLERANCE, check_mismatch, mismatch_tolerance
from renma.training.setup import assemble
from tests.end_to_end.tiny import TINY
from tests.inference.tiny_models import make
from tests.learning.tiny import make_row

INT8 = "rollout.engine={type: local, weights: int8}"
PROMPT = [7, 9, 11, 13, 15]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


# ---- sound with a correction, and not without

CHOICES = [10, 20, 30, 40]
DRAWS = 3000


class Coarse(Fbgemm):
    """The same arithmetic with 7 levels, so that what int8 does a little of shows in few samples."""

    levels = 3


def score(model: Any, action: tuple[int, ...]) -> tuple[float, np.ndarray]:
    """log pi of an action, and its gradient with respect to a few thousand of the weights."""
    ids = torch.tensor([[*PROMPT, *action]])
    logits = model(ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1, CHOICES]
    chosen = torch.tensor([[CHOICES.index(token)] for token in action])
    logp = logits.log_softmax(-1).gather(1, chosen).sum()
    parts = torch.autograd.grad(logp, [model.model.layers[0].mlp.down_proj.weight, model.lm_head.weight])
    return logp.item(), torch.cat([part.flatten() for part in parts]).numpy()


@pytest.mark.parametrize(
    ("length", "correction"), [(2, sequence_tis(cap=1e6)), (1, token_tis(cap=1e6))], ids=["sequence_tis", "token_tis"]
)
def test_corrected_samples_have_the_float_gradient_and_plain_ones_do_not(
    length: int, correction: Correction, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E over the engine's samples of weight * reward * grad log pi, against the sum over all actions, by z-scores."""
    monkeypatch.setattr(int8, "kernel_for", lambda device: Coarse())
    model: Any = make("llama", seed=2).eval()
    output_ids = torch.tensor(CHOICES)
    engine = LocalEngine(model, tokenizer, output_ids=output_ids, slots=512, weights="int8")

    async def draws() -> list[Sample]:
        params = (SamplingParams(max_tokens=length, seed=seed) for seed in range(DRAWS))
        return await asyncio.gather(*(engine.sample(PROMPT, p) for p in params))

    samples = asyncio.run(draws())
    rows = [
        make_row(
            [*PROMPT, *s.ids.tolist()], [0] * len(PROMPT) + [1] * length, trajectory=i, logprob=s.logprobs.tolist()
        )
        for i, s in enumerate(samples)
    ]
    learned = np.concatenate(Scorer(model, output_ids=output_ids).logprobs(rows))
    delta = learned - np.concatenate([s.logprobs for s in samples])
    trajectory = np.repeat(np.arange(DRAWS), length)
    factor = correction.apply(delta, trajectory, np.zeros_like(trajectory)).factor.reshape(DRAWS, length)[:, 0]

    actions = [()]
    for _ in range(length):
        actions = [(*action, token) for action in actions for token in CHOICES]
    rng = np.random.default_rng(length)
    rewards = dict(zip(actions, rng.normal(size=len(actions)), strict=True))
    scores = {action: score(model, action) for action in actions}
    exact = sum(np.exp(logp) * rewards[action] * gradient for action, (logp, gradient) in scores.items())
    # Along the gradient itself and along two others: the parts of a vector too long to test entry by entry.
    directions = np.stack([exact, *rng.normal(size=(2, len(exact)))])
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    along = {action: rewards[action] * (directions @ gradient) for action, (_, gradient) in scores.items()}
    terms = np.stack([along[tuple(s.ids.tolist())] for s in samples])

    def deviations(weight: np.ndarray) -> np.ndarray:
        weighed = weight[:, None] * terms
        return (weighed.mean(0) - directions @ exact) / (weighed.std(0) / DRAWS**0.5)

    assert np.abs(deviations(factor)).max() < 4
    assert np.abs(deviations(np.ones(DRAWS))).max() > 6


# ---- in a run


def quantised(*overrides: str) -> Recipe:
    return load_recipe({**TINY, "cold_start": None, "evaluation": {}}, ["training.steps=2", INT8, *overrides])


class Kept:
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def episode_done(self, step: int, trajectory: Any) -> None: ...

    def learned(self, step: int, groups: Any, batch: Any, metrics: dict[str, float]) -> None:
        self.metrics.append(metrics)

    async def step_done(self, loop: Loop) -> None: ...


def test_a_run_shows_its_mismatch_and_is_not_stopped_by_it() -> None:
    recipe = quantised("algorithm.correction={type: token_tis}", "algorithm.old_logprobs=recompute")
    parts, kept = assemble(recipe), Kept()
    learner = Learner(parts.policy.model, recipe.learner, temperature=recipe.sampling.temperature)
    asyncio.run(Loop(parts, learner, resolve(recipe.algorithm), kept).run())  # type: ignore[arg-type]
    assert len(kept.metrics) == 2
    for metrics in kept.metrics:
        # Own weights: under 1e-4 (test_loop.py).
        assert 1e-4 < metrics["learner/mismatch_mean"] < metrics["learner/mismatch_max"] < 0.5
        assert 0.9 < metrics["learner/effective_sample_size"] < 1


def test_the_tolerance_of_int8_is_wider_and_one_that_is_given_is_kept() -> None:
    assert mismatch_tolerance(quantised()) == INT8_TOLERANCE > TOLERANCE
    assert mismatch_tolerance(quantised("rollout.engine={type: local}")) == TOLERANCE
    assert mismatch_tolerance(quantised("training.mismatch_tolerance=0.1")) == 0.1
    learner = Learner(make("llama"), LearnerSection())
    row = make_row([*PROMPT, 17], [0, 0, 0, 0, 0, 1])
    shifted: Row = make_row(row.ids, row.trained, logprob=learner.logprobs([row])[0] + 0.2)
    assert check_mismatch(learner, [shifted], INT8_TOLERANCE) == pytest.approx(0.2, abs=1e-5)
    with pytest.raises(RunError, match=r"differ from the learner's by 0.2 "):
        check_mismatch(learner, [shifted], TOLERANCE)


SOUND = [
    ("preset: grpo", True),  # the ratio is against what the sampler recorded
    ("preset: grpo, old_logprobs: recompute", False),
    ("preset: grpo, old_logprobs: recompute, correction: {type: sequence_tis}", True),
    ("preset: on_policy", False),
    ("preset: on_policy, correction: {type: geometric_rejection}", True),
    ("preset: rloo", False),
    ("preset: rloo, correction: {type: token_tis}", True),
    ("preset: decoupled_ppo", True),
    ("preset: dpo", True),  # it learns from pairs, whoever wrote them
]


@pytest.mark.parametrize(("algorithm", "sound"), SOUND, ids=[algorithm for algorithm, _ in SOUND])
def test_a_recipe_that_would_take_int8_samples_for_the_learners_own_is_refused(algorithm: str, sound: bool) -> None:
    own = load_recipe({**TINY}, [f"algorithm={{{algorithm}}}"])
    check_recipe(own)
    if sound:
        check_recipe(load_recipe({**TINY}, [f"algorithm={{{algorithm}}}", INT8]))
        return
    with pytest.raises(RecipeError, match="int8 samples from another policy .* add algorithm.correction"):
        check_recipe(load_recipe({**TINY}, [f"algorithm={{{algorithm}}}", INT8]))


def test_the_clipped_ratio_against_the_recorded_logprobs_weighs_by_the_mismatch() -> None:
    """Why `preset: grpo` is sound without a correction: its gradient is that of exp(Delta) * A * log pi."""
    model = make("llama").eval()
    learner = Learner(model, LearnerSection(learning_rate=1e-9))
    plain = make_row([*PROMPT, 17], [0, 0, 0, 0, 0, 1])
    own = learner.logprobs([plain])[0]
    norms = {
        delta: learner.update([make_row(plain.ids, plain.trained, logprob=own - delta)], loss=ppo_clip())["grad_norm"]
        for delta in (0.0, 0.1)
    }
    assert norms[0.1] / norms[0.0] == pytest.approx(np.exp(0.1), rel=1e-3)
