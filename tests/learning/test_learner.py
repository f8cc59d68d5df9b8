"""The learner: independent of the packing, ratio 1 for an unchanged policy, a resumed run equal to the whole one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.errors import RecipeError, RunError
from renma.learning.learner import Learner
from renma.learning.losses import LossInput, ppo_clip, reinforce, sft
from renma.learning.rows import MissingLogprobs, Row
from renma.learning.scorer import Scorer
from renma.recipe import LearnerSection
from tests.learning.tiny import make_model, make_row, random_rows, separate_logprobs


def make_learner(kind: str = "llama", model: Any = None, **options: Any) -> Learner:
    own = ("output_ids", "temperature", "compute_dtype", "total_steps")
    more = {key: options.pop(key) for key in own if key in options}
    section = LearnerSection(**{"learning_rate": 1e-2, **options})
    return Learner(make_model(kind) if model is None else model, section, **more)


def parameters(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def recorded(learner: Learner, rows: list[Row]) -> list[Row]:
    """The rows with the learner's own log-probabilities as recorded ones: sampled by the current policy."""
    return [
        make_row(
            row.ids,
            row.trained,
            trajectory=row.trajectory,
            group=row.group,
            advantage=row.advantages[row.trained],
            logprob=values,
        )
        for row, values in zip(rows, learner.logprobs(rows), strict=True)
    ]


def copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


def test_logprobs_are_those_of_the_rows_apart_in_their_order() -> None:
    rows = random_rows(1)
    learner = make_learner(temperature=0.7, max_positions=20)
    for row, values in zip(rows, learner.logprobs(rows), strict=True):
        assert values == pytest.approx(separate_logprobs(learner.model, row, 0.7).detach().numpy(), abs=1e-5)
    assert learner.logprobs([]) == []


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "constant"])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), limit=st.sampled_from([16, 24, 48]))
def test_case_2_10_the_update_does_not_depend_on_the_packing(aggregate: str, seed: int, limit: int) -> None:
    rows = random_rows(seed, count=5)
    reference = [np.full(int(row.trained.sum()), -1.5, np.float32) for row in rows]
    results = []
    for max_positions in (limit, 4096):
        # Plain gradient descent would do; eps keeps Adam from dividing the rounding of tiny gradients by themselves.
        learner = make_learner(max_positions=max_positions, eps=1e-3, clip_norm=None)
        stats = learner.update(
            rows, loss=reinforce(), aggregate=aggregate, constant_length=9.0, kl=0.1, reference=reference, entropy=0.01
        )
        results.append((parameters(learner), stats))
    (few, few_stats), (many, many_stats) = results
    for name in few:
        torch.testing.assert_close(few[name], many[name], rtol=1e-4, atol=2e-5)
    for name in ("loss", "grad_norm", "entropy", "kl_reference", "kl_behaviour", "mismatch_max"):
        assert few_stats[name] == pytest.approx(many_stats[name], rel=1e-4, abs=1e-5)
    assert many_stats["positions"] <= few_stats["positions"] <= few_stats["row_tokens"]


def test_the_gradient_is_that_of_the_plain_objective() -> None:
    rows = random_rows(5)
    learner = make_learner("llama_tied", clip_norm=None)
    model = make_model("llama_tied")
    total = sum(int(row.trained.sum()) for row in rows)
    loss = torch.zeros(())
    for row in rows:
        ratio = (separate_logprobs(model, row) - torch.from_numpy(row.logprobs[row.trained])).exp()
        advantage = torch.from_numpy(row.advantages[row.trained])
        loss = loss + torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).sum() / total
    loss.backward()
    stats = learner.update(rows, loss=ppo_clip())
    assert stats["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert stats["trained_tokens"] == total
    assert stats["row_tokens"] == sum(map(len, rows))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mixtral"])
def test_case_6_11_an_unchanged_policy_has_ratio_one_even_with_dropout(kind: str) -> None:
    model = make_model(kind)
    model.config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    model.train()
    learner = make_learner(model=model)
    rows = recorded(learner, random_rows(2))
    model.train()
    for old in ("behaviour", "recompute", "on_policy"):
        before = copied(learner.state_dict())
        stats = learner.update(rows, loss=ppo_clip(), old_logprobs=old)  # type: ignore[arg-type]
        learner.load_state_dict(before)
        assert stats["ratio_max"] == pytest.approx(1, abs=1e-6) and stats["clip_share"] == 0
        assert stats["mismatch_max"] <= 1e-6 and abs(stats["kl_behaviour"]) <= 1e-6


def test_case_6_7_stale_rows_are_clipped_against_what_was_recorded() -> None:
    learner = make_learner()
    rows = recorded(learner, random_rows(2))
    for _ in range(3):
        learner.update(rows, loss=sft())
    stats = learner.update(rows, loss=ppo_clip())
    assert stats["clip_share"] > 0 and stats["ratio_max"] > 1.2
    assert stats["mismatch_mean"] > 0.1 and stats["kl_behaviour"] > 0
    recomputed = learner.update(rows, loss=ppo_clip(), old_logprobs="recompute")
    assert recomputed["ratio_max"] == 1 and recomputed["mismatch_mean"] > 0.1


def test_several_optimiser_steps_clip_against_the_policy_as_the_batch_began() -> None:
    learner = make_learner(mini_batch=2, epochs=2)
    rows = random_rows(3, count=6)
    stats = learner.update(rows, loss=ppo_clip(), old_logprobs="recompute")
    assert stats["updates"] == 6 and learner.steps == 6
    assert stats["ratio_max"] > 1
    assert stats["row_tokens"] == 2 * sum(map(len, rows))


@pytest.mark.parametrize("old", ["behaviour", "recompute"])
def test_the_mismatch_is_measured_before_later_passes_move_the_policy(old: Any) -> None:
    learner = make_learner(epochs=3)
    stats = learner.update(recorded(learner, random_rows(2)), loss=ppo_clip(), old_logprobs=old)
    assert stats["mismatch_max"] <= 1e-6 and stats["ratio_max"] > 1.001


def test_trajectories_and_groups_are_not_divided_between_optimiser_steps() -> None:
    seen: list[set[int]] = []

    def loss(x: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen.append(set(x.trajectory.tolist()))
        return -x.logp, {}

    # Four groups of two trajectories, each of two rows.
    rows = [make_row([n, k, 3, 4], [0, 1, 0, 1], trajectory=n, group=n // 2) for n in range(8) for k in range(2)]
    make_learner(mini_batch=4).update(rows, loss=loss, seed=1)
    assert len(seen) == 2 and seen[0] | seen[1] == set(range(8)) and not seen[0] & seen[1]
    assert all({n ^ 1 for n in part} == part for part in seen)


def test_the_seed_decides_which_groups_share_an_optimiser_step() -> None:
    rows = random_rows(6)
    results = []
    for seed in (0, 0, 1):
        learner = make_learner(mini_batch=3)
        learner.update(rows, loss=sft(), seed=seed)
        results.append(parameters(learner))
    assert same(results[0], results[1]) and not same(results[0], results[2])


@pytest.mark.parametrize("output_ids", [None, [0, 1, 2, 3, 4, 9]])
def test_sft_raises_the_likelihood_of_demonstrations_without_logprobs(output_ids: list[int] | None) -> None:
    ids = None if output_ids is None else torch.tensor(output_ids)
    learner = make_learner("llama_tied", output_ids=ids)
    rows = [make_row(row.ids, row.trained, trajectory=i, logprob=np.nan) for i, row in enumerate(random_rows(4))]
    first = learner.update(rows, loss=sft())
    for _ in range(8):
        last = learner.update(rows, loss=sft())
    assert last["loss"] < first["loss"] - 0.5
    assert "mismatch_mean" not in last and all(np.isfinite(value) for value in last.values())
    with pytest.raises(MissingLogprobs, match="sft"):
        learner.update(rows, loss=ppo_clip())


def test_rows_without_signal_change_nothing_and_are_still_counted() -> None:
    rows = random_rows(7)
    flat = [
        make_row(r.ids, r.trained, trajectory=i, advantage=0.0 if i % 2 else r.advantages[r.trained])
        for i, r in enumerate(rows)
    ]
    seen = []
    for marked in (True, False):
        learner = make_learner(eps=1e-3, measured_share=1.0)
        loss = reinforce()
        stats = learner.update(flat, loss=loss if marked else lambda x, loss=loss: loss(x))
        seen.append((parameters(learner), stats))
    (quick, quick_stats), (full, full_stats) = seen
    for name in quick:
        torch.testing.assert_close(quick[name], full[name], rtol=1e-4, atol=1e-5)
    assert quick_stats["entropy"] == pytest.approx(full_stats["entropy"], rel=1e-5)
    assert quick_stats["row_tokens"] == full_stats["row_tokens"]


def test_a_share_of_the_rows_without_signal_stands_for_all_of_them() -> None:
    """Eight equal rows without a signal and four that learn: measuring two of the eight gives the same means."""
    row = random_rows(9)[0]
    flat = [make_row(row.ids, row.trained, trajectory=i, advantage=0.0) for i in range(8)]
    loud = [make_row([5, 6, 7 + i], [0, 1, 1], trajectory=8 + i, advantage=1.0) for i in range(4)]
    seen = {}
    for share in (1.0, 0.25, 0.0):
        learner = make_learner(eps=1e-3, measured_share=share)
        seen[share] = learner.update([*flat, *loud], loss=reinforce()), parameters(learner)
    (whole, weights), (quarter, same), (none, also) = seen.values()
    assert quarter["entropy"] == pytest.approx(whole["entropy"], rel=1e-5)
    assert none["entropy"] != pytest.approx(whole["entropy"], rel=1e-3)
    assert none["positions"] < quarter["positions"] <= whole["positions"]
    assert whole["row_tokens"] == quarter["row_tokens"] == none["row_tokens"]
    for name in weights:
        torch.testing.assert_close(same[name], weights[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(also[name], weights[name], rtol=1e-5, atol=1e-6)


def test_a_batch_without_any_signal_leaves_the_weights_alone() -> None:
    learner = make_learner(weight_decay=0.1)
    rows = random_rows(8)
    learner.update(rows, loss=reinforce())
    before = parameters(learner)
    flat = [make_row(row.ids, row.trained, trajectory=i, advantage=0.0) for i, row in enumerate(rows)]
    for loss in (reinforce(), lambda x: reinforce()(x)):
        assert learner.update(flat, loss=loss)["grad_norm"] == 0
    assert same(before, parameters(learner))


def test_a_gradient_that_is_not_finite_is_skipped_and_counted() -> None:
    learner = make_learner()
    rows = random_rows(9)
    before = parameters(learner)
    stats = learner.update(rows, loss=lambda x: (x.logp * torch.inf, {}))
    assert stats["skipped_updates"] == 1 and learner.skipped == 1 and "grad_norm" not in stats
    assert same(before, parameters(learner))
    assert learner.update(rows, loss=sft())["skipped_updates"] == 0
    assert all(torch.isfinite(p).all() for p in learner.model.parameters())


def test_case_6_6_a_loss_of_another_shape_is_an_error_and_never_broadcast() -> None:
    with pytest.raises(ValueError, match="one value a token"):
        make_learner().update(random_rows(1), loss=lambda x: (-x.logp.mean()[None], {}))


def test_case_7_5_a_resumed_run_is_the_uninterrupted_one_bit_for_bit() -> None:
    batches = [random_rows(seed) for seed in range(5)]

    def train(learner: Learner, which: range) -> dict[str, torch.Tensor]:
        for number in which:
            learner.update(batches[number], loss=ppo_clip(), seed=number)
        return parameters(learner)

    options = {"warmup_steps": 2, "schedule": "cosine", "total_steps": 5, "mini_batch": 4}
    whole = make_learner(**options)
    train(whole, range(3))
    state = copied(whole.state_dict())
    wanted = train(whole, range(3, 5))

    resumed = make_learner(**options)
    resumed.load_state_dict(state)
    assert same(train(resumed, range(3, 5)), wanted)

    weights_only = make_learner(**options)
    weights_only.model.load_state_dict(state["parameters"], strict=False)
    assert not same(train(weights_only, range(3, 5)), wanted)


def test_case_7_5_with_bfloat16_weights_the_float32_masters_are_restored_too() -> None:
    options = {"compute_dtype": torch.bfloat16, "learning_rate": 1e-4}
    learner = make_learner(**options)
    exact = {name: p.clone() for name, p in make_model().named_parameters()}
    assert all(torch.equal(master, exact[name]) for name, master in learner.optimizer.masters.items())
    assert all(p.dtype == torch.bfloat16 for p in learner.model.parameters())
    for seed in range(2):
        learner.update(random_rows(seed), loss=sft())
    state = copied(learner.state_dict())
    learner.update(random_rows(2), loss=sft())
    resumed = make_learner(**options)
    resumed.load_state_dict(state)
    resumed.update(random_rows(2), loss=sft())
    for name, master in learner.optimizer.masters.items():
        assert torch.equal(master, resumed.optimizer.masters[name])
        assert torch.equal(master.to(torch.bfloat16), learner.optimizer.parameters[name])


def test_small_steps_add_up_in_the_masters_where_bfloat16_would_lose_them() -> None:
    learner = make_learner(compute_dtype=torch.bfloat16, learning_rate=1e-6)
    start = {name: master.clone() for name, master in learner.optimizer.masters.items()}
    for _ in range(3):
        learner.update(random_rows(0), loss=sft())
    moved = [(learner.optimizer.masters[name] - start[name]).abs().max() for name in start]
    assert max(float(m) for m in moved) == pytest.approx(3e-6, rel=0.1)


def test_case_7_6_after_loading_weights_the_masters_are_theirs() -> None:
    learner = make_learner(compute_dtype=torch.bfloat16, learning_rate=1e-30)
    other = {name: torch.randn_like(p) for name, p in learner.model.named_parameters()}
    learner.model.load_state_dict(other, strict=False)
    learner.refresh()
    learner.update(random_rows(0), loss=sft())
    assert same(parameters(learner), other)


def test_a_state_of_another_model_is_refused() -> None:
    state = make_learner("qwen3").state_dict()
    with pytest.raises(RunError, match="do not fit the model"):
        make_learner("llama").load_state_dict(state)


def test_the_schedule_warms_up_and_falls_to_zero_at_the_end() -> None:
    rates = {}
    for schedule in ("constant", "linear", "cosine"):
        learner = make_learner(schedule=schedule, warmup_steps=2, total_steps=4, learning_rate=1.0, clip_norm=1e-6)
        rates[schedule] = [learner.update(random_rows(0), loss=sft())["learning_rate"] for _ in range(4)]
    assert rates["constant"] == [0.5, 1, 1, 1]
    assert rates["linear"] == pytest.approx([0.5, 0.75, 0.5, 0.25])
    assert rates["cosine"] == pytest.approx([0.5, 0.8536, 0.5, 0.1464], abs=1e-4)
    with pytest.raises(RecipeError, match="total_steps"):
        make_learner(schedule="linear")


def test_the_gradient_norm_is_clipped() -> None:
    # With eps far above the gradient, Adam's step is learning_rate * gradient / eps.
    options = {"eps": 1e6, "betas": (0.0, 0.0), "learning_rate": 1e6}
    free, clipped = make_learner(clip_norm=None, **options), make_learner(clip_norm=0.25, **options)
    start = parameters(free)
    rows = random_rows(1)
    norm = free.update(rows, loss=sft())["grad_norm"]
    assert clipped.update(rows, loss=sft())["grad_norm"] == pytest.approx(norm)
    for learner, length in ((free, norm), (clipped, 0.25)):
        after = parameters(learner)
        moved = torch.nn.utils.get_total_norm([after[name] - start[name] for name in start])
        assert float(moved) == pytest.approx(length, rel=1e-2)


def test_the_reference_pulls_and_entropy_pushes() -> None:
    rows = random_rows(3)
    flat = [make_row(row.ids, row.trained, trajectory=i, advantage=0.0) for i, row in enumerate(rows)]
    learner = make_learner()
    reference = Scorer(copy.deepcopy(learner.model))
    for _ in range(5):
        learner.update(rows, loss=sft())
    far = learner.update(flat, loss=reinforce(), kl=1.0, reference=reference.logprobs(flat))["kl_reference"]
    for _ in range(10):
        stats = learner.update(flat, loss=reinforce(), kl=1.0, reference=reference.logprobs(flat))
    assert stats["kl_reference"] < far / 3
    first = learner.update(flat, loss=reinforce(), entropy=1.0)["entropy"]
    for _ in range(5):
        stats = learner.update(flat, loss=reinforce(), entropy=1.0)
    assert stats["entropy"] > first


def test_contradictions_are_named() -> None:
    rows = random_rows(1)
    with pytest.raises(RecipeError, match="one optimiser step a batch, and there are 2"):
        make_learner(epochs=2).update(rows, loss=reinforce(), old_logprobs="on_policy")
    with pytest.raises(RecipeError, match="reference's log-probabilities"):
        make_learner().update(rows, loss=reinforce(), kl=0.1)
    with pytest.raises(ValueError, match="one array for each row"):
        make_learner().update(rows, loss=reinforce(), kl=0.1, reference=[np.zeros(1, np.float32)] * len(rows))
    with pytest.raises(RunError, match="no trained token"):
        make_learner().update([make_row([1, 2], [0, 0])], loss=reinforce())


def test_progress_ends_at_the_total() -> None:
    told: list[tuple[int, int]] = []
    learner = make_learner(max_positions=16, epochs=2)
    learner.update(random_rows(1), loss=sft(), on_progress=lambda done, total: told.append((done, total)))
    assert len(told) > 2 and told[-1][0] == told[-1][1] and [d for d, _ in told] == sorted(d for d, _ in told)
