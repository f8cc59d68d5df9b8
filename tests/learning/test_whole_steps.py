"""Losses over whole trajectories and pairs: what they make ready, and that the learner hands it to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from renma.errors import RecipeError
from renma.learning.losses import LossInput, StepTokens, dpo, gspo, having, step_ratio
from renma.learning.rows import Row
from renma.learning.tokens import split
from tests.learning.test_learner import make_learner, parameters, recorded
from tests.learning.tiny import make_model, make_row, random_rows, separate_logprobs


def several_rows(seed: int) -> list[Row]:
    """Six trajectories in three groups, three of them of two rows; the first of a group has positive advantages."""
    rng = np.random.default_rng(seed)
    return [
        make_row(
            row.ids,
            row.trained,
            trajectory=number % 6,
            group=number % 6 // 2,
            advantage=-1.0 if number % 2 else 1.0,
            logprob=row.logprobs[row.trained] + rng.normal(size=int(row.trained.sum())) * 0.1,
            step=number // 6,
        )
        for number, row in enumerate(recorded(make_learner(), random_rows(seed, count=9)))
    ]


@pytest.mark.parametrize("name", ["gspo", "step_ratio", "dpo"])
def test_losses_over_whole_trajectories_depend_on_neither_packing_nor_order(name: str) -> None:
    loss = {"gspo": gspo(0.9, 1.1), "step_ratio": step_ratio(0.9, 1.1), "dpo": dpo(0.3)}[name]
    results = []
    for limit, turned in ((16, 1), (4096, 1), (4096, -1)):
        learner = make_learner(max_positions=limit, eps=1e-3, clip_norm=None)
        rows = several_rows(3)[::turned]
        goal = [np.full(int(row.trained.sum()), -1.5, np.float32) for row in rows]
        stats = learner.update(rows, loss=loss, aggregate="sequence_mean", reference=goal)
        results.append((parameters(learner), stats))
    for after, stats in results[1:]:
        for name, values in after.items():
            torch.testing.assert_close(values, results[0][0][name], rtol=1e-4, atol=2e-5)
        assert stats["grad_norm"] == pytest.approx(results[0][1]["grad_norm"], rel=1e-4)
        assert stats["loss"] == pytest.approx(results[0][1]["loss"], rel=1e-4)


def test_dpo_has_the_gradient_of_its_own_definition() -> None:
    rows = several_rows(5)
    model = make_model()
    margins = [torch.zeros(()) for _ in range(3)]
    for row in rows:
        ratio = separate_logprobs(model, row).sum() + 1.5 * int(row.trained.sum())
        margins[row.group] = margins[row.group] + (ratio if row.trajectory % 2 == 0 else -ratio)
    margin = torch.stack(margins)
    wanted = -torch.nn.functional.logsigmoid(0.3 * margin).mean()
    wanted.backward()
    goal = [np.full(int(row.trained.sum()), -1.5, np.float32) for row in rows]
    learner = make_learner(clip_norm=None, max_positions=16)
    stats = learner.update(rows, loss=dpo(0.3), aggregate="constant", constant_length=0.5, reference=goal)
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert stats["preference_loss"] == pytest.approx(float(wanted.detach()), rel=1e-4)
    assert stats["pair_accuracy"] == pytest.approx(float((margin > 0).float().mean())) and stats["pairs"] == 3
    with pytest.raises(RecipeError, match="the loss needs the reference"):
        learner.update(rows, loss=dpo())


def test_dpo_learns_to_prefer_and_never_divides_a_pair() -> None:
    rows = several_rows(6)
    learner = make_learner(mini_batch=2)
    goal = learner.logprobs(rows)
    first = learner.update(rows, loss=dpo(0.3), aggregate="constant", constant_length=0.5, reference=goal)
    for _ in range(10):
        last = learner.update(rows, loss=dpo(0.3), aggregate="constant", constant_length=0.5, reference=goal)
    assert first["updates"] == 3 and first["pairs"] == 1
    assert last["pair_accuracy"] == 1 and last["preference_loss"] < first["preference_loss"] / 2


@pytest.mark.parametrize(("mini_batch", "steps"), [(1, 3), (2, 3), (3, 2), (4, 2), (6, 1), (100, 1)])
def test_whole_groups_are_not_divided(mini_batch: int, steps: int) -> None:
    rows = [make_row([1, 2], [0, 1], trajectory=n, group=n // 2) for n in range(6)]
    parts = split(rows, mini_batch, np.random.default_rng(0), whole_groups=True)
    assert sorted(i for part in parts for i in part) == list(range(6)) and len(parts) == steps
    assert all({i ^ 1 for i in part} == set(part) for part in parts)


def test_what_a_loss_prepares_is_of_the_whole_step_and_reaches_its_tokens() -> None:
    seen: list[StepTokens] = []

    def prepare(step: StepTokens) -> np.ndarray:
        seen.append(step)
        return np.where(step.step == 1, np.nan, 10.0 * step.trajectory)

    def charge(x: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert x.prepared is not None and x.group is not None
        return -x.logp, {"own_mean": x.prepared}

    loss = having(charge, prepare=prepare, summary=lambda step, prepared: {"prepared_share": 0.25})
    learner = make_learner(max_positions=16, clip_norm=None)
    rows = several_rows(3)
    wanted = np.concatenate(learner.logprobs(rows))
    stats = learner.update(rows, loss=loss, aggregate="token_mean")
    [step] = seen
    assert step.logp == pytest.approx(wanted, abs=1e-6) and step.reference is None
    assert step.group.tolist() == [row.group for row in rows for _ in range(int(row.trained.sum()))]
    assert stats["own_mean"] == pytest.approx(np.where(step.step == 1, 0, 10.0 * step.trajectory).mean(), rel=1e-5)
    assert stats["prepared_share"] == 0.25
    kept = step.step == 0  # NaN: in no normaliser
    assert stats["loss"] == pytest.approx(-float(wanted[kept].mean()), rel=1e-4)


@pytest.mark.parametrize(("rows", "passes"), [(random_rows(3), 0), (several_rows(3), 1)])
def test_a_sequence_ratio_needs_another_pass_only_where_a_trajectory_has_several_rows(
    rows: list[Row], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner()
    count = 0
    plain = learner.logprobs

    def counted(rows: Any) -> Any:
        nonlocal count
        count += 1
        return plain(rows)

    monkeypatch.setattr(learner, "logprobs", counted)
    learner.update(rows, loss=gspo())
    assert count == passes
    learner.update(rows, loss=gspo(), old_logprobs="on_policy")  # every ratio is 1
    learner.update(rows, loss=step_ratio())
    assert count == passes
