"""Rollout correction: every rule by value and against the slow reference, its diagnostics, what it goes with."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.errors import RecipeError
from renma.learning import CORRECTIONS, LOSSES
from renma.learning.correction import (
    Correction,
    geometric_rejection,
    k3_rejection,
    sequence_mis,
    sequence_tis,
    token_mask,
    token_tis,
)
from renma.learning.losses import PolicyLoss, decoupled, dpo, gspo, hybrid, ppo_clip, reinforce, sft
from renma.learning.objective import Objective
from renma.learning.rows import MissingLogprobs, Row
from renma.learning.statistics import Mismatch
from renma.learning.tokens import Tokens
from tests.learning import reference
from tests.learning.batches import Batch, batches, ours
from tests.learning.test_learner import copied, make_learner, parameters, recorded
from tests.learning.tiny import make_row, random_rows

DIAGNOSTICS = (
    "mismatch_mean",
    "mismatch_max",
    "kl_behaviour",
    "effective_sample_size",
    "perplexity_ratio",
    "mismatch_outside_share",
    "correction_clip_share",
    "correction_reject_share",
)


def apply(correction: Correction, delta: list[float], trajectory: Any = None, step: Any = None) -> Any:
    zeros = np.zeros(len(delta), np.int64)
    return correction.apply(
        np.array(delta),
        zeros if trajectory is None else np.array(trajectory),
        zeros if step is None else np.array(step),
    )


OLD, ROLLOUT = np.array([-1, -0.5, -3]), np.array([-1.1, -0.5, -6])


def test_case_6_5_token_weights_are_truncated() -> None:
    result = apply(token_tis(2.0), OLD - ROLLOUT)
    assert result.factor.tolist() == pytest.approx([1.105, 1, 2], abs=1e-3)
    assert result.clipped.tolist() == [False, False, True] and result.keep.all()


def test_case_6_5_the_ratio_of_the_sequence() -> None:
    assert apply(sequence_tis(100.0), OLD - ROLLOUT).factor.tolist() == pytest.approx([22.2] * 3, abs=0.01)
    assert apply(sequence_tis(2.0), OLD - ROLLOUT).factor.tolist() == [2, 2, 2]
    two = apply(sequence_tis(2.0), OLD - ROLLOUT, trajectory=[4, 4, 7])
    assert two.factor.tolist() == pytest.approx([1.105, 1.105, 2], abs=1e-3)
    steps = apply(sequence_tis(2.0, level="step"), OLD - ROLLOUT, step=[0, 1, 1])
    assert steps.factor.tolist() == pytest.approx([1.105, 2, 2], abs=1e-3)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (reinforce(importance=True), {}),
        (ppo_clip(), {}),
        (gspo(), {}),
        (decoupled(), {"old_logprobs": "recompute"}),
        (reinforce(), {"correction": token_tis()}),
        (ppo_clip(), {"correction": geometric_rejection(), "old_logprobs": "recompute"}),
    ],
)
def test_case_6_5_without_recorded_logprobs_nothing_starts(loss: PolicyLoss, options: dict[str, Any]) -> None:
    rows = [
        *random_rows(1, count=2),
        make_row([1, 2, 3, 4], [0, 1, 1, 1], trajectory=2, logprob=[-1.0, np.nan, np.nan]),
    ]
    learner = make_learner()
    before = parameters(learner)
    with pytest.raises(MissingLogprobs, match=r"needs the log-probabilities recorded.* 2 tokens of trajectory 2"):
        learner.update(rows, loss=loss, **options)
    assert learner.steps == 0 and all((before[name] == p).all() for name, p in parameters(learner).items())


def test_a_token_outside_the_mask_leaves_loss_and_normaliser() -> None:
    delta = np.log([0.4, 1.0, 4.0, 6.0])
    result = apply(token_mask(), delta)
    assert result.factor.tolist() == pytest.approx([0, 1, 4, 0]) and result.keep.tolist() == [False, True, True, False]
    rows = [make_row([1, 2, 3, 4, 5], [0, 1, 1, 1, 1], logprob=-1.0)]
    tokens, _ = Tokens.of(rows).corrected(token_mask(), (delta - 1).astype(np.float32))
    assert tokens.weighed(Objective(reinforce())).weight.tolist() == [0, 0.5, 0.5, 0]  # type: ignore[union-attr]


def test_sequences_are_rejected_whole() -> None:
    trajectory = [0, 0, 1, 1]
    delta = [0.3, 0.2, 0.5, 0.5]  # products e^0.5 and e^1, means e^.25 and e^.5
    assert apply(sequence_mis(), delta, trajectory).factor.tolist() == pytest.approx([np.exp(0.5)] * 2 + [0] * 2)
    assert apply(geometric_rejection(0.7, 1.4), delta, trajectory).factor.tolist() == [1, 1, 0, 0]
    # k3 of .3 and .2: mean(.0499, .0214) = .0356; of .5 twice: .1487
    assert apply(k3_rejection(0.036), delta, trajectory).factor.tolist() == [1, 1, 0, 0]
    assert apply(k3_rejection(0.035), delta, trajectory).factor.tolist() == [0, 0, 0, 0]
    assert apply(geometric_rejection(0.7, 1.3, level="step"), delta, trajectory, [0, 1, 0, 0]).keep.tolist() == [
        False, True, False, False,
    ]  # fmt: skip


def test_defaults_are_those_of_the_table() -> None:
    assert {name: CORRECTIONS[name]() for name in CORRECTIONS} == {
        "token_tis": Correction("token_tis", "token", cap=2.0),
        "sequence_tis": Correction("sequence_tis", "sequence", cap=2.0),
        "token_mask": Correction("token_mask", "token", low=0.5, high=5.0),
        "sequence_mis": Correction("sequence_mis", "sequence", cap=2.0, low=0.5, high=2.0),
        "geometric_rejection": Correction("geometric_rejection", "sequence", "geometric", False, None, 0.999, 1.001),
        "k3_rejection": Correction("k3_rejection", "sequence", "k3", False, high=0.01),
    }


def test_far_apart_the_weights_are_still_finite() -> None:
    for name in CORRECTIONS:
        result = apply(CORRECTIONS[name](), [500.0, -500.0, 300.0])
        assert np.isfinite(result.factor).all()
    assert apply(Correction("bare", "sequence"), [500.0, 300.0]).factor[0] == pytest.approx(np.exp(20), rel=1e-6)


@pytest.mark.parametrize("make", [lambda: token_tis(0.5), lambda: token_mask(1.5, 3), lambda: k3_rejection(0.0)])
def test_bounds_that_are_none_are_refused(make: Any) -> None:
    with pytest.raises(RecipeError, match="correction (token_tis|token_mask|k3_rejection): "):
        make()


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("token_tis", {}),
    ("sequence_tis", {}),
    ("sequence_tis", {"level": "step", "cap": 1.5}),
    ("token_mask", {"high": 1.5}),
    ("sequence_mis", {}),
    ("geometric_rejection", {"low": 0.8, "high": 1.2}),
    ("geometric_rejection", {"low": 0.8, "high": 1.2, "level": "step"}),
    ("k3_rejection", {"high": 0.05}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@settings(max_examples=15, deadline=None)
@given(batch=batches(spread=0.3), data=st.data())
def test_value_and_gradient_are_those_of_the_slow_reference(
    kind: str, options: dict[str, Any], batch: Batch, data: st.DataObject
) -> None:
    loss = data.draw(st.sampled_from(["reinforce", "ppo_clip", "cispo"]))
    objective = Objective(
        LOSSES[loss](),
        data.draw(st.sampled_from(["token_mean", "sequence_mean", "step_mean", "constant"])),
        constant_length=5.0,
        kl=data.draw(st.sampled_from([0.0, 0.2])),  # weighs what is kept, without the factor
        correction=CORRECTIONS[kind](**options),
    )
    tokens, held = batch.tokens, batch.logp.tolist()
    factor, keep = reference.correct(kind, options, batch.began.tolist(), tokens)

    def wanted(logp: list[float]) -> float:
        losses = [f * v for f, v in zip(factor, reference.LOSSES[loss](logp, held, tokens), strict=True)]
        penalty = reference.kl_terms("k2", logp, tokens)
        losses = [value + objective.kl * p for value, p in zip(losses, penalty, strict=True)]
        return reference.aggregate(objective.aggregate, losses, tokens, keep, 5.0)

    value, gradient, _ = ours(objective, batch)
    assert value == pytest.approx(wanted(held), rel=1e-6, abs=1e-6)
    direction = np.random.default_rng(0).normal(size=len(held))
    rise = reference.slope(wanted, held, direction.tolist())
    if not np.isnan(rise):
        assert float(gradient @ direction) == pytest.approx(rise, rel=1e-5, abs=1e-6)
    assert not gradient[~np.array(keep)].any()
    order = data.draw(st.permutations(range(len(batch.rows))))
    moved, gradient_moved, _ = ours(objective, batch.permuted(order))
    assert moved == pytest.approx(value, abs=1e-9)
    np.testing.assert_allclose(gradient_moved, np.concatenate([batch.split(gradient)[i] for i in order]), atol=1e-9)


# Diagnostics


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20), st.integers(0, 20))
def test_the_diagnostics_are_their_definitions_however_they_are_gathered(deltas: list[float], cut: int) -> None:
    mismatch = Mismatch()
    for part in (deltas[:cut], [np.nan], deltas[cut:]):
        mismatch.add(np.array(part, dtype=np.float64))
    result, d = mismatch.result(), np.array(deltas)
    w = np.exp(d)
    assert result["mismatch_mean"] == pytest.approx(np.abs(d).mean())
    assert result["mismatch_max"] == pytest.approx(np.abs(d).max())
    assert result["kl_behaviour"] == pytest.approx((w - 1 - d).mean(), abs=1e-12)
    assert result["effective_sample_size"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()))
    assert 0 < result["effective_sample_size"] <= 1 + 1e-12
    assert result["perplexity_ratio"] == pytest.approx(np.exp(d.mean()))
    assert result["mismatch_outside_share"] == np.mean((w < 0.5) | (w > 2))
    assert Mismatch().result() == {}


@pytest.mark.parametrize("correction", [None, token_tis(1.2), token_mask(0.8, 1.2), k3_rejection(0.04)])
@pytest.mark.parametrize("old", ["behaviour", "recompute"])
def test_the_learner_always_reports_them(correction: Correction | None, old: Any) -> None:
    learner = make_learner()
    rng = np.random.default_rng(0)
    rows = [
        make_row(row.ids, row.trained, trajectory=i, logprob=row.logprobs[row.trained] + rng.normal(size=n) * 0.3)
        for i, row in enumerate(recorded(learner, random_rows(2)))
        for n in [int(row.trained.sum())]
    ]
    delta = np.concatenate(learner.logprobs(rows)) - np.concatenate([row.logprobs[row.trained] for row in rows])
    stats = learner.update(rows, loss=reinforce(), correction=correction, old_logprobs=old)
    assert set(DIAGNOSTICS) <= set(stats)
    assert stats["mismatch_mean"] == pytest.approx(np.abs(delta).mean(), rel=1e-4)
    assert stats["perplexity_ratio"] == pytest.approx(np.exp(delta.mean()), rel=1e-4)
    ratio = np.exp(delta)
    clipped = np.mean(ratio > 1.2) if correction == token_tis(1.2) else 0
    assert stats["correction_clip_share"] == pytest.approx(clipped)
    if correction == token_mask(0.8, 1.2):
        assert stats["correction_reject_share"] == pytest.approx(np.mean((ratio < 0.8) | (ratio > 1.2)))
        assert stats["correction_reject_share"] > 0
    elif correction is None or correction.kind == "token_tis":
        assert stats["correction_reject_share"] == 0
    else:
        assert 0 < stats["correction_reject_share"] < 1


# In the learner


def mismatched(learner: Any, seed: int, scale: float = 0.3) -> list[Row]:
    """Six trajectories, three of two rows, recorded by a sampler that is off by noise."""
    rng = np.random.default_rng(seed)
    rows = recorded(learner, random_rows(seed, count=9))
    result = []
    for number, row in enumerate(rows):
        n = int(row.trained.sum())
        trajectory = number % 6
        result.append(
            make_row(
                row.ids,
                row.trained,
                trajectory=trajectory,
                group=trajectory // 2,
                advantage=rng.normal(size=n),
                logprob=row.logprobs[row.trained] + rng.normal(size=n) * scale,
                step=number // 6,
            )
        )
    return result


@pytest.mark.parametrize(
    "correction", [sequence_tis(), sequence_mis(0.5, 2.0), token_mask(0.8, 1.2), geometric_rejection(0.9, 1.1)]
)
def test_a_corrected_update_depends_on_neither_packing_nor_order(correction: Correction) -> None:
    results = []
    for limit, turned in ((16, False), (4096, False), (4096, True)):
        learner = make_learner(max_positions=limit, eps=1e-3, clip_norm=None)
        rows = mismatched(learner, 3)
        stats = learner.update(
            rows[::-1] if turned else rows, loss=ppo_clip(), old_logprobs="recompute", correction=correction
        )
        results.append((parameters(learner), stats))
    for after, stats in results[1:]:
        for name, values in after.items():
            np.testing.assert_allclose(values, results[0][0][name], rtol=1e-4, atol=2e-5)
        for name in ("loss", "grad_norm", "correction_reject_share", "correction_clip_share"):
            assert stats[name] == pytest.approx(results[0][1][name], rel=1e-4, abs=1e-6)


def test_an_unchanged_sampler_is_not_corrected() -> None:
    for correction in (
        token_tis(),
        sequence_tis(),
        token_mask(),
        sequence_mis(),
        geometric_rejection(),
        k3_rejection(),
    ):
        results = []
        for given_correction in (None, correction):
            learner = make_learner(eps=1e-3)
            rows = recorded(learner, random_rows(4))
            learner.update(rows, loss=ppo_clip(), old_logprobs="recompute", correction=given_correction)
            results.append(parameters(learner))
        for name, values in results[0].items():
            np.testing.assert_allclose(values, results[1][name], rtol=1e-4, atol=1e-6)


def test_a_batch_that_is_rejected_whole_changes_nothing() -> None:
    learner = make_learner(weight_decay=0.1)
    rows = mismatched(learner, 1, scale=1.0)
    before = parameters(learner)
    stats = learner.update(rows, loss=reinforce(), correction=k3_rejection(1e-9))
    assert stats["correction_reject_share"] == 1 and stats["grad_norm"] == 0 and stats["loss"] == 0
    assert all((before[name] == p).all() for name, p in parameters(learner).items())


def test_demonstrations_among_samples_are_left_as_they_are() -> None:
    rows = [make_row([1, 2, 3], [0, 1, 1], logprob=-1.0), make_row([1, 2], [0, 1], trajectory=1, logprob=np.nan)]
    tokens, _ = Tokens.of(rows).corrected(token_mask(), np.array([-1.0, 2.0, -3.0], np.float32))
    assert tokens.factor is not None and tokens.keep is not None
    assert tokens.factor.tolist() == [1, 0, 1] and tokens.keep.tolist() == [True, False, True]
    stats = make_learner().update(rows, loss=hybrid(), old_logprobs="recompute", correction=token_tis())
    assert np.isfinite(stats["loss"]) and stats["demonstrated_share"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"loss": ppo_clip(), "correction": token_tis()}, "old_logprobs: recompute"),
        ({"loss": gspo(), "correction": sequence_mis()}, "old_logprobs: recompute"),
        ({"loss": decoupled(), "correction": token_tis(), "old_logprobs": "recompute"}, "a weight of its own"),
        ({"loss": reinforce(importance=True), "correction": token_tis()}, "a weight of its own"),
        ({"loss": decoupled()}, "makes pi_old/mu 1"),
        ({"loss": sft(), "correction": k3_rejection()}, "nothing to correct"),
        ({"loss": dpo(), "correction": k3_rejection()}, "nothing to correct"),
        ({"loss": ppo_clip(), "old_logprobs": "recorded"}, "unknown old_logprobs 'recorded'"),
    ],
)
def test_pairs_without_sense_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Objective(**parts).check()


@pytest.mark.parametrize(
    "parts",
    [
        {"loss": ppo_clip(), "correction": token_tis(), "old_logprobs": "recompute"},
        {"loss": ppo_clip(), "correction": token_tis(), "old_logprobs": "on_policy"},
        {"loss": ppo_clip(), "correction": geometric_rejection()},
        {"loss": reinforce(), "correction": token_tis()},
        {"loss": decoupled(), "correction": k3_rejection(), "old_logprobs": "recompute"},
    ],
)
def test_pairs_with_sense_are_taken(parts: dict[str, Any]) -> None:
    Objective(**parts).check()


def test_case_6_7_recomputed_old_logprobs_of_stale_samples_are_refused() -> None:
    # Sampled by version 3, trained at version 5: a recomputed pi_old has ratio 1, whatever the sampler was.
    learner = make_learner()
    rows = [dataclasses.replace(r, versions=np.where(r.trained, 3, -1).astype(np.int32)) for r in random_rows(2)]
    before = copied(learner.state_dict())
    for old in ("recompute", "on_policy"):
        with pytest.raises(RecipeError, match="up to 2 versions old"):
            learner.update(rows, loss=ppo_clip(), old_logprobs=old, version=5)  # type: ignore[arg-type]
    assert learner.update(rows, loss=ppo_clip(), version=5)["ratio_max"] != 1  # the recorded ones
    learner.load_state_dict(before)
    for options in (
        {"loss": ppo_clip(), "old_logprobs": "recompute", "version": 3},
        {"loss": ppo_clip(), "old_logprobs": "recompute", "version": 5, "correction": token_tis()},
        {"loss": decoupled(), "old_logprobs": "recompute", "version": 5},
    ):
        assert learner.update(rows, **options)["updates"] == 1
    with pytest.raises(RecipeError, match="'decoupled'"):
        Objective(ppo_clip(), old_logprobs="recompute").check(staleness=1)
