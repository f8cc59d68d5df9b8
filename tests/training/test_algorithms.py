"""The table of presets, and how a recipe changes one."""

from __future__ import annotations

import dataclasses
import math
import sys
import types

import numpy as np
import pytest
import torch

from renma.credit import Evidence, credit
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

    def attempt(member: int, ret: float) -> Trajectory:
        step = Step(ids, ids + member, np.zeros(1, np.float32), ids, Action(""), state_key="start")
        return Trajectory(task, member, (step,), "done", "answer", rewards={"r": ret})

    return Group(task, tuple(attempt(i, r) for i, r in enumerate(returns)))


def advantages(algorithm: Algorithm, *returns: float) -> list[float]:
    """Of one-token trajectories, the critic's values and the greedy return 0.25, the teacher's log-probability -0.5."""
    one = [np.full(1, 0.25, np.float32) for _ in returns]
    teacher = [np.full(1, -0.5, np.float32) for _ in returns]
    evidence = Evidence([one], [[0.0] * len(returns)], [0.25], [teacher])
    return [float(row[0]) for row in credit(algorithm.advantage, [group(*returns)], evidence).advantages[0]]


def token_losses(algorithm: Algorithm, ratio: float, advantage: float) -> tuple[float, float]:
    """Loss of one token at a ratio to the old policy, and its derivative by log pi."""
    logp = torch.tensor([-1.0], requires_grad=True)
    old = logp.detach() - float(np.log(ratio))
    zero = torch.zeros(1, dtype=torch.int64)
    value, _ = algorithm.loss(LossInput(logp, old, old, torch.tensor([advantage]), None, zero, zero))
    value.sum().backward()
    assert logp.grad is not None
    return float(value[0].detach()), float(logp.grad[0])


ROOT3 = 3**0.5
GROUPED = [ROOT3, -1 / ROOT3, -1 / ROOT3, -1 / ROOT3]
MEAN = [0.75, -0.25, -0.25, -0.25]
LEAVE_ONE_OUT = [1, -1 / 3, -1 / 3, -1 / 3]
PAIR = [1, -1, 0, 0]
NONE = (0.0, math.inf)
CLIP, HIGHER, NEAR = (0.8, 1.2), (0.8, 1.28), (0.9997, 1.0004)
# advantages of returns 1, 0, 0, 0; aggregation; smallest group; the ratios where the gradient ends
EXPECTED = {
    "reinforce": ([1, 0, 0, 0], "constant", 1, NONE),
    "reinforce_pp": (GROUPED, "token_mean", 1, CLIP),
    "reinforce_pp_baseline": (GROUPED, "token_mean", 2, CLIP),
    "rloo": (LEAVE_ONE_OUT, "constant", 2, NONE),
    "remax": (MEAN, "constant", 1, NONE),
    "ppo": (GROUPED, "token_mean", 1, CLIP),
    "steppo": (GROUPED, "step_mean", 1, (0.95, 1.05)),
    "grpo": (GROUPED, "sequence_mean", 2, CLIP),
    "grpo_mean": (MEAN, "token_mean", 2, CLIP),
    "dr_grpo": (MEAN, "constant", 2, CLIP),
    "dapo": (GROUPED, "token_mean", 2, HIGHER),
    "gspo": (GROUPED, "sequence_mean", 2, NEAR),
    "cispo": (GROUPED, "token_mean", 2, NONE),
    "gigpo": ([2 * a for a in MEAN], "sequence_mean", 2, CLIP),
    "starpo_s": (GROUPED, "token_mean", 2, HIGHER),
    "decoupled_ppo": (GROUPED, "token_mean", 2, CLIP),
    "on_policy": (MEAN, "token_mean", 2, CLIP),
    "sft": ([1, 1, 1, 1], "token_mean", 1, NONE),
    "rft": ([1, 0, 0, 0], "token_mean", 1, NONE),
    "dpo": (PAIR, "constant", 2, None),
    "multi_turn_dpo": (PAIR, "constant", 2, None),
    "step_dpo": (PAIR, "constant", 2, None),
    "sft_rl": (GROUPED, "sequence_mean", 2, CLIP),
    "distillation": ([-0.5] * 4, "token_mean", 1, NONE),
}


def test_the_table_is_what_is_tested():
    assert set(PRESETS) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_presets_are_the_compositions_of_their_papers(name):
    values, aggregate, smallest, bounds = EXPECTED[name]
    algorithm = resolve(section(preset=name))
    assert algorithm.name == name and algorithm.source
    assert advantages(algorithm, 1.0, 0.0, 0.0, 0.0) == pytest.approx(values, abs=1e-4)
    assert (algorithm.aggregate, algorithm.min_group_size) == (aggregate, smallest)
    assert (algorithm.kl, algorithm.entropy, algorithm.mask_truncated) == (0.0, 0.0, False)
    if bounds is None:
        assert algorithm.needs_reference
        return
    assert token_losses(algorithm, 1.0, 1.0)[1] == pytest.approx(-1.0)  # on-policy all are -A grad log pi
    low, high = bounds
    if math.isfinite(high):
        assert token_losses(algorithm, high - 1e-4, 1.0)[1] == pytest.approx(-high, abs=1e-3)
        assert token_losses(algorithm, high + 1e-4, 1.0)[1] == 0.0
        assert token_losses(algorithm, low - 1e-4, -1.0)[1] == 0.0
        assert token_losses(algorithm, low + 1e-4, -1.0)[1] == pytest.approx(low, abs=1e-3)
    else:
        assert token_losses(algorithm, 2.0, 1.0)[1] != 0.0 and token_losses(algorithm, 0.5, 1.0)[1] != 0.0


def test_how_a_batch_comes_about_belongs_to_the_preset():
    def of(name: str) -> Algorithm:
        return resolve(section(preset=name))

    assert {n: of(n).needs for n in PRESETS if of(n).needs} == {
        "remax": ("greedy",),
        "ppo": ("values",),
        "steppo": ("values",),
        "distillation": ("teacher",),
    }
    assert {n: of(n).learns_from for n in PRESETS if of(n).learns_from != "samples"} == {
        "sft": "demonstrations",
        "sft_rl": "samples_and_demonstrations",
    }
    uniform, mixed = group(1.0, 1.0), group(1.0, 0.0)
    assert of("dapo").select([uniform, mixed]) == ([mixed], [uniform]) and of("dapo").refills > 0
    assert of("starpo_s").select([uniform, mixed]) == ([mixed], [uniform]) and not of("starpo_s").refills
    assert resolve(section(preset="dapo", select={"type": "none"}, refills=0)).select is None
    corrected = resolve(section(preset="on_policy", correction={"type": "k3_rejection", "high": 0.1})).correction
    assert corrected is not None and corrected.high == 0.1


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
