"""Preferences through the whole loop: reward model then PPO, a bandit of one step, process rewards, recorded pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from renma.errors import RecipeError
from renma.rollout.store import read_trajectories
from renma.training.metrics import read_metrics
from renma.training.trainer import Trainer
from tests.end_to_end.tiny import TINY

VARIETY = {"type": "tests.end_to_end.tiny:variety"}
RLHF: dict[str, Any] = {
    **TINY,
    "evaluation": {},
    "cold_start": {**TINY["cold_start"], "demonstrations": 16, "batch": 16},
    "reward_model": {
        "preferences": {"type": "sampled", "groups": 6, "group_size": 4, "rewards": [VARIETY]},
        "held_out": 0.2,
        "learner": {"learning_rate": 3e-3},
    },
    "rewards": [{"type": "reward_model"}],
    "algorithm": {"preset": "ppo", "kl": 0.05, "kl_form": "k1_reward"},
    "training": {"steps": 2, "checkpoint_every": 1},
    "trackers": [],
}


def fit(recipe: dict[str, Any], output: Path, *overrides: str) -> Path:
    return Trainer(recipe, output=output, overrides=overrides, progress="quiet").fit()


def lines(run: Path, phase: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run) if line["phase"] == phase]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{step}" / "policy" / "model.safetensors")


def test_preferences_to_reward_model_to_ppo_and_a_resume_of_it(tmp_path: Path) -> None:
    run = fit(RLHF, tmp_path)
    assert (run / "reward_model").is_dir()
    assert 0 <= lines(run, "reward_model")[-1]["held_out/accuracy"] <= 1
    trained = lines(run, "train")
    assert all("reward/reward_model" in line and "critic/value_loss" in line for line in trained)
    half = fit(RLHF, tmp_path, "training.steps=1")
    Trainer(resume=half, overrides=["training.steps=2"], progress="quiet").fit()
    assert all(torch.equal(weights(run, 2)[k], v) for k, v in weights(half, 2).items())


def test_the_bandit_of_one_step_is_the_same_loop(tmp_path: Path) -> None:
    run = fit(RLHF, tmp_path, "rollout.max_turns=1", "training.steps=1")
    line = lines(run, "train")[0]
    assert line["turns"] == 1.0 and "reward/reward_model" in line


def test_process_rewards_land_on_their_own_steps(tmp_path: Path) -> None:
    recipe = {
        **RLHF,
        "reward_model": {
            **RLHF["reward_model"],
            "form": "process",
            "preferences": {"type": "sampled", "groups": 6, "group_size": 4, "rewards": [VARIETY], "threshold": 0.4},
        },
        "rewards": [{"type": "process_reward_model"}],
        "algorithm": {"preset": "steppo"},
    }
    run = fit(recipe, tmp_path, "training.steps=1")
    assert lines(run, "train")[0]["learner/grad_norm"] > 0
    found = read_trajectories(run / "trajectories", phase="train")
    assert found and all(
        "process_reward_model" in step.reward for t in found for step in t.steps if len(step.action_ids)
    )


def test_dpo_learns_from_the_pairs_of_an_earlier_run(tmp_path: Path) -> None:
    base = {key: value for key, value in RLHF.items() if key not in ("reward_model", "rewards", "algorithm")}
    earlier = fit({**base, "rewards": [VARIETY]}, tmp_path, "training.steps=2")
    recipe = {**base, "algorithm": {"preset": "dpo", "learns_from": "preferences"}}
    recipe["preferences"] = {"type": "run", "path": str(earlier)}
    run = fit(recipe, tmp_path, "learner.learning_rate=0.003", "training.steps=4")
    trained = lines(run, "train")
    assert trained[0]["learner/preference_loss"] == pytest.approx(0.6931, abs=1e-3), "policy and reference are one"
    assert trained[-1]["learner/preference_loss"] < trained[0]["learner/preference_loss"]


def test_dpo_learns_from_a_file_of_conversations(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"Question: {i} + 1 =", "chosen": f"Answer: {i + 1}\n", "rejected": f"Answer: {i}\n"}
        for i in range(8)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    base = {key: value for key, value in RLHF.items() if key not in ("reward_model", "rewards", "algorithm")}
    recipe = {
        **base,
        "preferences": {"type": "jsonl", "path": str(pairs)},
        "algorithm": {"preset": "dpo", "learns_from": "preferences"},
    }
    run = fit(recipe, tmp_path, "training.steps=8", "learner.learning_rate=0.003", "rollout.tasks_per_step=8")
    trained = lines(run, "train")
    assert trained[-1]["learner/pair_accuracy"] > 0.9 and trained[-1]["learner/preference_loss"] < 0.69


def test_a_reward_that_waits_for_a_model_nobody_trains_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no reward_model section"):
        Trainer({**RLHF, "reward_model": None}, output=tmp_path, progress="quiet")


def test_recorded_pairs_are_never_sampled(tmp_path: Path) -> None:
    base = {key: value for key, value in RLHF.items() if key not in ("reward_model", "rewards", "algorithm")}
    recipe = {**base, "preferences": {"type": "sampled"}, "algorithm": {"preset": "dpo", "learns_from": "preferences"}}
    with pytest.raises(RecipeError, match="dpo makes a pair of each sampled group"):
        Trainer(recipe, output=tmp_path, progress="quiet")
