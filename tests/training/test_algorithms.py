"""The table of presets, and how a recipe changes one."""

from __future__ import annotations

import dataclasses
import sys
import types

import numpy as np
import pytest
import torch

from renma.credit.group_relative import rloo
from renma.errors import RecipeError
from renma.learning.losses import LossInput
from renma.recipe import AlgorithmSection, Component
from renma.training.algorithms import PRESETS, Algorithm, preset, resolve
from renma.types import Action, Group, Step, Task, Trajectory


def section(**keys) -> AlgorithmSection:
    return AlgorithmSection.model_validate(keys)


def group(*returns: float) -> Group:
    task, ids = Task("t", ""), np.zeros(1, np.int32)
    step = Step(ids, ids, np.zeros(1, np.float32), ids, Action(""))
    return Group(
        task, tuple(Trajectory(task, i, (step,), "done", "answer", rewards={"r": r}) for i, r in enumerate(returns))
    )


def advantages(algorithm: Algorithm, *returns: float) -> list[float]:
    return [float(row[0]) for row in algorithm.advantage([group(*returns)])[0]]


def token_losses(algorithm: Algorithm, ratio: float, advantage: float) -> tuple[float, float]:
    """Loss of one token at a ratio to the old policy, and its derivative by log pi."""
    logp = torch.tensor([-1.0], requires_grad=True)
    old = logp.detach() - float(np.log(ratio))
    zero = torch.zeros(1, dtype=torch.int64)
    value, _ = algorithm.loss(LossInput(logp, old, old, torch.tensor([advantage]), None, zero, zero))
    value.sum().backward()
    assert logp.grad is not None
    return float(value[0].detach()), float(logp.grad[0])


EXPECTED = {  # advantages of returns 1, 0, 0, 0; aggregation; smallest group; does the ratio clip at 1.2?
    "grpo": ([3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], "sequence_mean", 2, True),
    "grpo_mean": ([0.75, -0.25, -0.25, -0.25], "token_mean", 2, True),
    "dr_grpo": ([0.75, -0.25, -0.25, -0.25], "constant", 2, True),
    "rloo": ([1, -1 / 3, -1 / 3, -1 / 3], "constant", 2, False),
    "reinforce": ([1, 0, 0, 0], "constant", 1, False),
}


def test_the_table_is_what_is_tested():
    assert set(PRESETS) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_presets_are_the_compositions_of_their_papers(name):
    values, aggregate, smallest, clips = EXPECTED[name]
    algorithm = resolve(section(preset=name))
    assert algorithm.name == name and algorithm.source
    assert advantages(algorithm, 1.0, 0.0, 0.0, 0.0) == pytest.approx(values, abs=1e-4)
    assert (algorithm.aggregate, algorithm.min_group_size) == (aggregate, smallest)
    assert (algorithm.kl, algorithm.entropy, algorithm.mask_truncated) == (0.0, 0.0, False)
    assert token_losses(algorithm, 1.0, 1.0)[1] == pytest.approx(-1.0)  # on-policy all are -A grad log pi
    assert token_losses(algorithm, 1.19, 1.0)[1] == pytest.approx(-1.19 if clips else -1.0)
    assert token_losses(algorithm, 1.21, 1.0)[1] == (0.0 if clips else -1.0)
    assert token_losses(algorithm, 0.79, -1.0)[1] == (0.0 if clips else 1.0)


def test_every_part_can_be_replaced():
    algorithm = resolve(
        section(
            preset="grpo",
            advantage={"type": "rloo", "normalise": True},
            loss={"type": "ppo_clip", "low": 0.5, "high": 2.0},
            aggregate="step_mean",
            old_logprobs="recompute",
            kl=0.04,
            entropy=0.0,
            mask_truncated=True,
        )
    )
    assert algorithm.advantage == rloo(normalise=True)
    assert token_losses(algorithm, 1.9, 1.0)[1] == pytest.approx(-1.9)
    assert algorithm.aggregate == "step_mean"
    assert algorithm.old_logprobs == "recompute"
    assert (algorithm.kl, algorithm.entropy, algorithm.mask_truncated) == (0.04, 0.0, True)


def test_what_is_not_named_stays():
    plain, changed = resolve(section()), resolve(section(kl=0.1))
    assert changed.kl == 0.1
    kept = [f.name for f in dataclasses.fields(Algorithm) if f.name not in ("kl", "loss")]
    assert [getattr(changed, key) for key in kept] == [getattr(plain, key) for key in kept]


def test_the_smallest_group_follows_the_estimator():
    assert resolve(section(preset="grpo", advantage={"type": "reinforce"})).min_group_size == 1
    assert resolve(section(preset="reinforce", advantage={"type": "rloo"})).min_group_size == 2
    custom = dataclasses.replace(preset("grpo"), advantage=lambda groups: [])
    assert custom.min_group_size == 1


def test_a_preset_of_the_users_own(monkeypatch):
    module = types.ModuleType("their_algorithms")
    module.value = dataclasses.replace(preset("rloo"), name="theirs", entropy=0.01)
    module.maker = lambda: module.value
    module.wrong = lambda: "grpo"
    monkeypatch.setitem(sys.modules, "their_algorithms", module)
    assert resolve(section(preset="their_algorithms:value")).name == "theirs"
    assert resolve(section(preset="their_algorithms:maker", kl=0.5)).kl == 0.5
    with pytest.raises(RecipeError, match=r"algorithm.preset: 'their_algorithms:wrong' gives a str"):
        resolve(section(preset="their_algorithms:wrong"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"preset": "gropo"}, r"algorithm\.preset: unknown algorithm preset 'gropo': did you mean 'grpo'\?"),
        ({"advantage": Component(type="rlo")}, r"algorithm\.advantage: .*did you mean 'rloo'\?"),
        ({"advantage": Component(type="rloo", std=True)}, r"algorithm\.advantage\.std: 'rloo' has no option 'std'"),
        ({"loss": Component(type="ppo_clip", hi=1.3)}, r"algorithm\.loss\.hi: 'ppo_clip' has no option 'hi'"),
        ({"loss": Component(type="ppo")}, r"algorithm\.loss: unknown loss 'ppo'"),
    ],
)
def test_mistakes_name_the_place(keys, message):
    with pytest.raises(RecipeError, match=message):
        resolve(AlgorithmSection(**keys))
