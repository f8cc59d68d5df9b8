"""The benchmark of a step's parts, on the smallest recipe."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from benchmarks import step_time
from tests.end_to_end.tiny import TINY


@pytest.fixture
def arguments(tmp_path: Path) -> Namespace:
    return Namespace(steps=2, set=["rollout.tasks_per_step=2"], cold=False, cpu=False, policies=tmp_path / "policies")


def test_the_phases_add_up_and_the_cold_started_policy_is_kept(tmp_path: Path, arguments: Namespace) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(TINY))
    console = Console(record=True, width=160)
    steps = step_time.measure(str(recipe), arguments, console)
    assert len(steps) == 2, "the first is not counted"
    for step in steps:
        own = {key: value for key, value in step.items() if key.startswith("own/")}
        assert sum(own.values()) == pytest.approx(step["step"])
        assert {"own/decode", "own/forward", "own/render", "own/store", "own/metrics"} <= set(own)
        assert 0 < step["rest_share"] < 1 and step["trajectories"] == 8
    # The writer has a thread of its own: on a busy machine what it writes of a step may fall into the next.
    assert any(step.get("beside/writer", 0.0) > 0 for step in steps)
    assert "cold start, step" in console.export_text()
    arguments.steps, arguments.cpu = 1, True
    quiet = Console(record=True, width=160)
    found = {"tiny": step_time.medians(step_time.measure(str(recipe), arguments, quiet))}
    assert "cold start" not in quiet.export_text(clear=False), "taken from the folder"
    quiet.print(step_time.table(found, 1))
    text = quiet.export_text()
    assert "not model compute" in text and "rendering and tokenising" in text
