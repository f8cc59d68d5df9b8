"""Switching the algorithm is one line: every preset trains the same recipe, and only `algorithm.preset` differs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from renma.errors import RecipeError
from renma.recipe_load import load_recipe
from renma.rollout.store import read_trajectories
from renma.training.algorithms import PRESETS, preset
from renma.training.metrics import read_events, read_metrics
from renma.training.trainer import Trainer
from tests.end_to_end.tiny import TINY

COMMON: dict[str, Any] = {
    **TINY,
    "evaluation": {},
    "cold_start": {**TINY["cold_start"], "demonstrations": 16, "batch": 16},
    "training": {"steps": 2, "checkpoint_every": 1},
    "trackers": [],
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of the recipe's own kind, further on than the one that starts."""
    run = Trainer(
        {**COMMON, "training": {"steps": 1}},
        output=tmp_path_factory.mktemp("teacher"),
        overrides=["algorithm.preset=sft", "learner.learning_rate=0.01"],
        progress="quiet",
    ).fit()
    return run / "checkpoints" / "step_1" / "policy"


def fit(output: Path, teacher: Path, *overrides: str) -> Path:
    recipe = {**COMMON, "teacher": {"type": "pretrained", "source": str(teacher)}}
    return Trainer(recipe, output=output, overrides=overrides, progress="quiet").fit()


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{step}" / "policy" / "model.safetensors")


def sampled(run: Path) -> list[list[bytes]]:
    found = read_trajectories(run / "trajectories", phase="train")
    return [[step.logprobs.tobytes() for step in trajectory.steps] for trajectory in found]


def steps(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run) if line["phase"] == "train"]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_trains_the_same_recipe(name: str, teacher: Path, tmp_path: Path) -> None:
    run = fit(tmp_path, teacher, f"algorithm.preset={name}")
    lines = steps(run)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert all(value is not None and math.isfinite(value) for k, value in line.items() if k != "phase"), name
        assert line["learner/updates"] == 1 and line["learner/grad_norm"] > 0
    if "values" in preset(name).needs:
        assert all("critic/value_loss" in line for line in lines)
    first, second = weights(run, 1), weights(run, 2)
    assert any(not torch.equal(first[key], second[key]) for key in first), "the policy has learnt"


RESUMED = {
    "critic": ["algorithm.preset=ppo"],
    "reference": ["algorithm.preset=dpo"],
    "greedy baseline": ["algorithm.preset=remax"],
    "refills": ["algorithm.preset=dapo"],
    "teacher": ["algorithm.preset=distillation"],
    "running mean": ["algorithm.preset=reinforce", "algorithm.advantage={type: reinforce, baseline: running_mean}"],
    "one slot": ["rollout.slots=1"],
    "older policies": ["rollout.cross_policy={mode: step, stale_share: 0.5}"],
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(case: str, teacher: Path, tmp_path: Path) -> None:
    """Bit for bit, whatever it needs besides the policy and however small its batches are."""
    overrides = RESUMED[case]
    whole = fit(tmp_path, teacher, *overrides)
    half = fit(tmp_path, teacher, *overrides, "training.steps=1")
    Trainer(resume=half, overrides=["training.steps=2"], progress="quiet").fit()
    expected, found = weights(whole, 2), weights(half, 2)
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert sampled(whole) == sampled(half), "the same log-probabilities, to the last bit"


def test_a_shared_trunk_and_a_warm_critic(teacher: Path, tmp_path: Path) -> None:
    shared = fit(tmp_path, teacher, "algorithm.preset=steppo", "critic.trunk=shared")
    assert all("critic/explained_variance" in line for line in steps(shared))
    warm = fit(tmp_path, teacher, "algorithm.preset=ppo", "critic.warmup_steps=1")
    assert "learner/loss" not in steps(warm)[0] and "learner/loss" in steps(warm)[1]


def test_kl_in_the_reward_reaches_every_kind_of_estimator(teacher: Path, tmp_path: Path) -> None:
    """At the start policy and reference are one, so nothing changes; after an update the penalty is there."""
    for name in ("grpo", "ppo", "steppo"):
        on = ["algorithm.kl=0.5", "algorithm.kl_form=k1_reward", "learner.learning_rate=0.01"]
        with_kl = steps(fit(tmp_path, teacher, f"algorithm.preset={name}", *on))
        without = steps(fit(tmp_path, teacher, f"algorithm.preset={name}", "learner.learning_rate=0.01"))
        assert with_kl[0]["learner/grad_norm"] == pytest.approx(without[0]["learner/grad_norm"], rel=1e-3), name
        assert with_kl[1]["learner/grad_norm"] != pytest.approx(without[1]["learner/grad_norm"], rel=1e-3), name


def test_every_correction_can_be_added_to_a_recipe(teacher: Path, tmp_path: Path) -> None:
    from renma.learning import CORRECTIONS

    for name in CORRECTIONS:
        line = steps(
            fit(
                tmp_path,
                teacher,
                "training.steps=1",
                "algorithm.old_logprobs=recompute",
                f"algorithm.correction={{type: {name}}}",
            )
        )[0]
        assert line["learner/correction_reject_share"] == pytest.approx(0.0), (
            "sampler and learner are one: nothing is rejected"
        )


def test_a_correction_that_takes_the_batch_away_says_so_once(teacher: Path, tmp_path: Path) -> None:
    """Bounds that no rounding keeps to: hardly a token is left, and nobody would see it in the loss."""
    nothing = "algorithm.correction={type: geometric_rejection, low: 1.0, high: 1.0}"
    run = fit(tmp_path, teacher, "algorithm.old_logprobs=recompute", nothing)
    assert [line["learner/correction_reject_share"] > 0.5 for line in steps(run)] == [True, True]
    assert [event["step"] for event in read_events(run) if event["event"] == "rejected"] == [1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.preset=sft", "cold_start=null"], "no demonstrator"),
        (["algorithm.preset=distillation"], "needs a teacher"),
        (["algorithm.learns_from=preferences"], "need both the section `preferences`"),
        (["algorithm.preset=dapo", "training.staleness=1"], "algorithm.refills=3 with training.staleness=1"),
        (["algorithm.preset=on_policy", "learner.epochs=2"], "one optimiser step a batch"),
        (["algorithm.learns_from=samples_and_demonstrations"], "needs a loss for both"),
        (["algorithm.preset=rloo", "rollout.group_size=1"], "rollout.group_size must be >= 2 for rloo"),
        (["algorithm.preset=gropo"], "did you mean 'grpo'"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        Trainer(COMMON, output=tmp_path, overrides=overrides, progress="quiet")


def test_case_6_7_stale_samples_with_a_recomputed_ratio_are_refused() -> None:
    stale = ["training.staleness=2", "algorithm.old_logprobs=recompute"]
    with pytest.raises(RecipeError, match="would not see that the sampler was older"):
        Trainer(load_recipe(COMMON, stale), progress="quiet")
    Trainer(load_recipe(COMMON, [*stale, "algorithm.correction={type: token_tis}"]), progress="quiet")
