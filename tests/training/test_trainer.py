"""What reaches the learner through a real run and its resumption: the KL reference, adapters, the schedule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from renma import Trainer
from tests.end_to_end.tiny import TINY


def kls(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["learner/kl_reference"] for line in lines if line["phase"] == "train"]


def test_the_reference_is_the_policy_as_training_began_also_after_a_resume(tmp_path: Path) -> None:
    recipe = {
        **TINY,
        "cold_start": None,
        "evaluation": {},
        "algorithm": {"preset": "grpo", "kl": 0.01},
        "learner": {"learning_rate": 0.01},
        "training": {"steps": 2, "checkpoint_every": 1},
    }
    run = Trainer(recipe, output=tmp_path, progress="quiet").fit()
    first = kls(run)
    assert first[0] == pytest.approx(0.0, abs=1e-9), "the policy has not moved yet"
    assert first[1] > 1e-6
    Trainer(resume=run, overrides=["training.steps=4"], progress="quiet").fit()
    assert kls(run)[:2] == first
    assert kls(run)[3] > first[1], "the distance is still from the start, not from the resumed weights"


def test_lora_trains_its_adapters_only_and_resumes(tmp_path: Path) -> None:
    recipe = {
        **TINY,
        "model": {**TINY["model"], "lora": {"rank": 4}},
        "cold_start": None,
        "evaluation": {},
        "learner": {"learning_rate": 0.01},
        "training": {"steps": 4, "checkpoint_every": 2},
    }
    whole = Trainer(recipe, output=tmp_path / "whole", progress="quiet").fit()
    part = Trainer({**recipe, "training": {"steps": 2}}, output=tmp_path / "part", progress="quiet").fit()
    Trainer(resume=part, overrides=["training.steps=4"], progress="quiet").fit()

    def losses(run: Path) -> list[float]:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [line["learner/grad_norm"] for line in lines if line["phase"] == "train"]

    assert losses(part) == losses(whole)


def test_the_schedule_ends_with_the_run_whatever_the_mini_batch(tmp_path: Path) -> None:
    recipe = {
        **TINY,
        "cold_start": None,
        "evaluation": {},
        "learner": {"learning_rate": 0.01, "schedule": "linear", "mini_batch": 4},
        "training": {"steps": 2},
    }
    run = Trainer(recipe, output=tmp_path, progress="quiet").fit()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["phase"] == "train"]
    assert [line["learner/updates"] for line in train] == [4, 4]
    # The last of 4 optimiser steps of each of 2 training steps: 3/8 and 7/8 of the way are done.
    assert [line["learner/learning_rate"] for line in train] == pytest.approx([0.01 * 5 / 8, 0.01 / 8])
