"""KL to a reference: values, exact expected gradients, and the two forms in the learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from renma.errors import RecipeError
from renma.learning.losses import k1, k2, k3, k3_ratio, reinforce, sft
from renma.learning.objective import Objective
from renma.learning.rows import MissingLogprobs
from tests.learning.test_learner import make_learner
from tests.learning.tiny import make_row, random_rows

LOGITS = [0.3, -0.2, 0.5]
REFERENCE = torch.tensor([0, 0.4, -0.1], dtype=torch.float64).log_softmax(-1)


def expected_slope(form: str, sampler: list[float] | None = None) -> list[float]:
    """The exact expected gradient over three actions, sampled from the policy itself or from another one."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(-1)
    old = logp.detach() if sampler is None else torch.tensor(sampler, dtype=torch.float64).log_softmax(-1)
    value = {
        "kl": lambda: (logp.exp() * (logp - REFERENCE)).sum(),
        "k1": lambda: (old.exp() * k1(logp, REFERENCE)).sum(),
        "k2": lambda: (old.exp() * k2(logp, REFERENCE)).sum(),
        "k3": lambda: (old.exp() * k3(logp, REFERENCE)).sum(),
        "k3_ratio": lambda: (old.exp() * k3_ratio(logp, REFERENCE, old)).sum(),
    }[form]()
    return [float(g) for g in torch.autograd.grad(value, logits)[0]]


def test_case_2_13_expected_gradients_of_the_kl_estimates() -> None:
    assert expected_slope("kl") == pytest.approx([0.0224, -0.1794, 0.1570], abs=1e-4)
    assert expected_slope("k1") == pytest.approx([0, 0, 0], abs=1e-12)
    assert expected_slope("k2") == pytest.approx(expected_slope("kl"))
    assert expected_slope("k3") == pytest.approx([0.0592, -0.2247, 0.1655], abs=1e-4)
    assert expected_slope("k3_ratio") == pytest.approx(expected_slope("kl"))


def test_case_2_13_off_policy_only_the_ratio_form_is_right() -> None:
    other = [0.9, 0.0, -0.5]
    assert expected_slope("k3_ratio", other) == pytest.approx(expected_slope("kl"))
    assert expected_slope("k2", other) != pytest.approx(expected_slope("kl"), abs=1e-2)


def test_case_2_13_values() -> None:
    one = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert float(k1(*one)) == 0.5
    assert float(k2(*one)) == pytest.approx(0.125)
    assert float(k3(*one)) == pytest.approx(0.1065, abs=1e-4)
    assert float(k3_ratio(*one, torch.tensor([-1.2]))) == pytest.approx(np.exp(0.2) * 0.1065, abs=1e-4)
    assert k1(np.array([-1.0]), np.array([-1.5])).tolist() == [0.5]


def test_k1_in_the_reward_is_the_kl_in_expectation() -> None:
    p = torch.tensor(LOGITS, dtype=torch.float64).log_softmax(-1)
    assert float((p.exp() * k1(p, REFERENCE)).sum()) == pytest.approx(float((p.exp() * k3(p, REFERENCE)).sum()))


@pytest.mark.parametrize("form", ["k2", "k3_ratio"])
def test_both_forms_pull_the_learner_to_the_reference(form: Any) -> None:
    rows = random_rows(3)
    flat = [make_row(r.ids, r.trained, trajectory=i, advantage=0.0) for i, r in enumerate(rows)]
    learner = make_learner()
    options = {"kl": 1.0, "kl_form": form, "reference": learner.logprobs(flat), "old_logprobs": "recompute"}
    for _ in range(5):
        learner.update(rows, loss=sft())
    first = learner.update(flat, loss=reinforce(), **options)
    for _ in range(10):
        last = learner.update(flat, loss=reinforce(), **options)
    assert last["kl_reference"] < first["kl_reference"] / 3 and last["kl_penalty"] < first["kl_penalty"] / 3


def test_the_reference_is_measured_without_a_penalty_too() -> None:
    rows = random_rows(3, count=4)
    learner = make_learner()
    reference = [values - 0.5 for values in learner.logprobs(rows)]
    stats = learner.update(rows, loss=reinforce(), reference=reference)
    assert stats["kl_reference"] == pytest.approx(np.exp(-0.5) - 1 + 0.5, rel=1e-3) and "kl_penalty" not in stats


def test_what_a_form_needs_is_said() -> None:
    with pytest.raises(RecipeError, match="kl_form 'k3': did you mean 'k"):
        Objective(reinforce(), kl=0.1, kl_form="k3").check()  # type: ignore[arg-type]
    rows = [make_row([1, 2, 3], [0, 1, 1], logprob=np.nan)]
    reference = [np.zeros(2, np.float32)]
    with pytest.raises(MissingLogprobs, match="kl_form 'k3_ratio' needs .* 2 tokens of trajectory 0"):
        make_learner().update(rows, loss=reinforce(), kl=0.1, kl_form="k3_ratio", reference=reference)
