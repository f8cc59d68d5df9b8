"""--profile: a trace that opens, a table that adds up, and nothing at all without it."""

from __future__ import annotations

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from renma.cli import app
from renma.errors import RunError
from renma.profiling import Recording, Span, recording, span
from renma.training.profile import MODEL, REST, StepProfiler, lanes, phase_table, share_of_rest
from tests.end_to_end.tiny import TINY


def renma(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--progress", "plain"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps without a profile, then two more of which one was profiled, then one more likewise."""
    base = tmp_path_factory.mktemp("runs")
    recipe = base / "tiny.yaml"
    recipe.write_text(yaml.safe_dump({**TINY, "cold_start": None, "evaluation": {}, "training": {"steps": 2}}))
    renma("train", str(recipe), "--output", str(base))
    assert not (base / "tiny" / "profile").exists()
    told = renma("resume", str(base / "tiny"), "training.steps=4", "--profile", "--profile-steps", "1")
    assert re.search(r"profile of step 4: [\d.]+% of it is not model compute; table and trace: .*step-4\.txt", told)
    told = renma("resume", str(base / "tiny"), "training.steps=5", "--profile")
    assert "profile of step 5" in told, "the only step that is left is profiled without one to warm up"
    return base / "tiny" / "profile"


def events_of(folder: Path, step: int) -> list[dict[str, Any]]:
    with gzip.open(folder / f"step-{step}.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def test_only_the_steps_that_were_asked_for_are_there_and_nothing_is_left_over(folder: Path) -> None:
    names = [f"step-{step}.{ending}" for step in (4, 5) for ending in ("json.gz", "txt")]
    assert sorted(path.name for path in folder.iterdir()) == names


@pytest.mark.parametrize("step", [4, 5])
def test_the_spans_of_the_trace_are_nested_and_hold_the_operators(folder: Path, step: int) -> None:
    events = events_of(folder, step)
    spans = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in {**MODEL, **REST}]
    assert {"step", "rollout", "render", "parse", "decode", "sampler", "credit", "forward", "backward"} <= {
        e["name"] for e in spans
    }
    (whole,) = [e for e in spans if e["name"] == "step"]
    assert {e["tid"] for e in spans} == {whole["tid"]}
    ends: list[float] = []  # of the spans that are open
    for event in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while ends and ends[-1] <= start + 0.01:
            ends.pop()
        assert not ends or end <= ends[-1] + 0.01, event["name"]
        ends.append(end)
    decodes = [e for e in spans if e["name"] == "decode"]
    products = [
        e for e in events if e.get("cat") == "cpu_op" and e["name"] in ("aten::linear", "aten::addmm", "aten::mm")
    ]
    inside = [p for p in products if any(d["ts"] <= p["ts"] <= d["ts"] + d["dur"] for d in decodes)]
    assert inside, "a decoding round has matrix products in it"


def test_what_overlaps_the_loop_has_lanes_of_its_own_on_the_same_clock(folder: Path) -> None:
    events = events_of(folder, 4)
    (whole,) = [e for e in events if e["name"] == "step" and e.get("cat") == "user_annotation"]
    beside = [e for e in events if e.get("cat") == "renma"]
    counts = {name: sum(e["name"] == name for e in beside) for name in ("episode", "reward")}
    assert counts == {"episode": 16, "reward": 16}
    episodes = [e for e in beside if e["name"] == "episode"]
    assert all(
        whole["ts"] - 1e3 <= e["ts"] and e["ts"] + e["dur"] <= whole["ts"] + whole["dur"] + 1e3 for e in episodes
    )
    by_lane: dict[str, list[dict[str, Any]]] = {}
    for event in beside:
        by_lane.setdefault(event["tid"], []).append(event)
    for lane in by_lane.values():
        ordered = sorted(lane, key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in pairwise(ordered))


def test_the_table_adds_up_to_the_step(folder: Path) -> None:
    text = (folder / "step-4.txt").read_text(encoding="utf-8")
    whole = float(re.match(r"step 4: ([\d.]+) s", text)[1])  # type: ignore[index]
    parts = re.findall(r"^(?:model compute|the rest) +([\d.]+) s +([\d.]+)%", text, re.MULTILINE)
    assert sum(float(seconds) for seconds, _ in parts) == pytest.approx(whole, abs=0.002)
    assert sum(float(share) for _, share in parts) == pytest.approx(100, abs=0.15)
    phases = re.findall(r"^  .* ([\d.]+) s +[\d.]+% +[\d,]+$", text, re.MULTILINE)
    assert sum(map(float, phases)) == pytest.approx(whole, abs=0.003)
    assert "episode" in text.partition("beside the loop")[2]


def test_a_step_that_fails_leaves_nothing_and_the_next_is_profiled(tmp_path: Path) -> None:
    notes: list[str] = []
    profiled = StepProfiler(tmp_path / "profile", 1, 2, notes.append)
    with profiled(0), span("step"):
        pass
    assert not notes and not (tmp_path / "profile").exists(), "not one of those that are wanted"
    with pytest.raises(KeyboardInterrupt), profiled(1), span("step"):
        raise KeyboardInterrupt
    assert not notes and not (tmp_path / "profile").exists()
    with profiled(2), span("step"):
        pass
    assert len(notes) == 1 and (tmp_path / "profile" / "step-3.json.gz").exists()


def test_a_folder_that_takes_no_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    blocked = StepProfiler(tmp_path / "profile", 0, 1, print)
    with (
        pytest.raises(RunError, match=r"^the profile of step 1 could not be written in .*profile: .*$"),
        blocked(0),
        span("step"),
    ):
        pass


def test_names_that_nobody_listed_are_told_with_the_rest() -> None:
    with recording() as found, span("step"), span("decode"), span("novelty"):
        pass
    text = phase_table(found, "step 1")
    assert re.search(r"^  novelty +[\d.]+ s", text.partition("the rest")[2], re.MULTILINE)
    assert share_of_rest({"decode": 3.0, "novelty": 1.0}) == 0.25
    assert phase_table(Recording(), "nothing").startswith("nothing: 0.000 s")


intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=20)


@given(intervals)
def test_lanes_hold_no_two_spans_at_once_and_are_as_few_as_can_be(times: list[tuple[int, int]]) -> None:
    spans = [Span("x", 0, -1, start, start + length, 0) for start, length in times]
    placed = lanes(spans)
    assert sorted(s.start for _, s in placed) == sorted(s.start for s in spans)
    for lane in {lane for lane, _ in placed}:
        own = [s for number, s in placed if number == lane]
        assert all(a.end <= b.start for a, b in pairwise(own))
    most = max((sum(s.start <= moment < s.end for s in spans) for moment in range(71)), default=0)
    assert len({lane for lane, _ in placed}) <= max(most, min(1, len(spans)))
