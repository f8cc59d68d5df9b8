"""The report: what it shows, what it leaves out, and that hostile text stays text."""

from __future__ import annotations

import itertools
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.errors import RunError
from renma.viewer.report import page, write_curve_svg, write_report
from renma.viewer.run_data import RunData, read_run
from renma.viewer.svg import MOST_POINTS, Chart, Series, draw, running_mean, thinned, ticks
from renma.viewer.text import duration, number, points, printable

VOID = {"meta"}
SVG = "{http://www.w3.org/2000/svg}"
SETS = {
    "held_out": {
        "before": {"success": 0.24, "low": 0.2, "high": 0.29, "n": 100, "k": 1, "successes": [1] * 24 + [0] * 76},
        "cold_start": {"success": 0.3, "low": 0.25, "high": 0.35, "n": 100, "k": 1, "successes": [1] * 30 + [0] * 70},
        "after": {"success": 0.52, "low": 0.47, "high": 0.58, "n": 100, "k": 1, "successes": [1] * 52 + [0] * 48},
    },
    "other": {
        "before": {"success": 0.5, "low": 0.4, "high": 0.6, "n": 100},
        "after": {"success": 0.6, "low": 0.5, "high": 0.7, "n": 100},
    },
}
RECIPE = "name: quick\nmodel: {type: pretrained, source: tiny}\nalgorithm: {preset: rloo}\ntraining: {steps: 4}\n"


class Page(HTMLParser):
    """Checks that tags balance; collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes, self.shown = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.shown.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.shown).split())


def evaluation(step: int, success: float) -> dict:
    return {
        "step": step,
        "phase": "evaluation",
        "seconds": 1.0,
        "evaluation/held_out/success": success,
        "evaluation/held_out/low": success - 0.05,
        "evaluation/held_out/high": success + 0.05,
    }


def metrics() -> list[dict]:
    return [
        evaluation(0, 0.24),
        {"step": 0, "phase": "cold_start", "seconds": 2.0, "learner/loss": 1.5},
        {"step": 1, "phase": "cold_start", "seconds": 3.0, "learner/loss": 0.5},
        evaluation(0, 0.3),
        *(
            {"step": s, "phase": "train", "seconds": 10.0 * s, "success": 0.3 + s / 20, "learner/entropy": 1.0 / s}
            for s in range(1, 5)
        ),
        evaluation(4, 0.52),
    ]


def run_folder(path: Path, *, lines=None, summary=None, recipe: str | None = RECIPE) -> Path:
    path.mkdir(exist_ok=True)
    lines = metrics() if lines is None else lines
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    if recipe is not None:
        (path / "recipe.yaml").write_text(recipe)
    return path


def whole(path: Path, samples=()) -> Path:
    return run_folder(path, summary={"sets": SETS, "samples": list(samples), "status": "done", "seconds": 754})


def test_everything_is_in_one_file(tmp_path):
    sample = {
        "task": "2 + 3?",
        "answer": 5,
        "return": 1.0,
        "success": True,
        "stop_reason": "answer",
        "steps": [{"action": "Call: calc(2 + 3)\n", "observation": "Result: 5\n", "reward": 0.0}],
    }
    path = write_report(whole(tmp_path / "run", [sample]))
    assert path == tmp_path / "run" / "report.html"
    assert [p.name for p in path.parent.iterdir() if p.suffix == ".part"] == []
    text = path.read_text()
    shown = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(shown.tags)
    assert not [value for name, value in shown.attributes if name in ("src", "href") or name.startswith("on")]
    assert not re.search(r"url\(|@import", text)
    assert "prefers-color-scheme: dark" in text
    for words in (
        "quick", "Finished", "tiny", "rloo", "12 min 34 s", "Before 24.0 % 20.0 % – 29.0 %", "After RL 52.0 %",
        "Entropy", "Cold start: loss", "solved", "Call: calc(2 + 3)", "Result: 5", "Right answer: 5", "preset: rloo",
    ):  # fmt: skip
        assert words in shown.text
    assert "Left out" not in shown.text


def test_rls_part_is_told_from_the_cold_starts(tmp_path):
    shown = Page(write_report(whole(tmp_path / "run")).read_text()).text
    assert re.search(r"After cold start 30.0 % 25.0 % – 35.0 % \+6.0 \+2.0 to \+11.0 p = 0.031 After RL", shown)
    assert re.search(r"After RL 52.0 % 47.0 % – 58.0 % \+22.0 \+14.0 to \+30.0 p < 0.001 In all \+28.0", shown)
    # Without each task's outcome the change comes from the two intervals alone: 0.1 -+ sqrt(0.1^2 + 0.1^2).
    assert re.search(r"After RL 60.0 % 50.0 % – 70.0 % \+10.0 −4.1 to \+24.1 Learning", shown)


def test_hostile_text_stays_text(tmp_path):
    evil = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\"'><b>\x1b[31m\x00\u202e\ud800"
    sample = {"task": evil, "answer": evil, "success": False, "return": 0, "stop_reason": evil,
              "steps": [{"action": evil, "observation": evil, "reward": 1.0}]}  # fmt: skip
    lines = [{**evaluation(0, 0.5), f"evaluation/{evil}/success": 0.5}, {"step": 1, "success": 0.5, evil: 1.0}]
    folder = run_folder(
        tmp_path / "run",
        lines=lines,
        summary={"sets": {evil: {"before": {"success": 0.5, "n": evil}}}, "samples": [sample], "status": evil},
        recipe="name: '<script>alert(2)</script>'\nseed: '<i>'\n# " + "</pre><script>alert(3)</script>\n",
    )
    shown = Page(write_report(folder).read_text(encoding="utf-8"))
    assert not {"script", "img"} & set(shown.tags)
    assert not [name for name, _ in shown.attributes if name.startswith("on")]
    assert "<script>alert(1)</script><img src=x onerror=alert(1)>\"'>" in shown.text
    assert "<script>alert(2)</script>" in shown.text and "<script>alert(3)</script>" in shown.text
    assert "\\x1b[31m\\x00\\u202e\\ud800" in shown.text
    ET.parse(write_curve_svg(folder, tmp_path / "curve.svg"))


@pytest.mark.parametrize("missing", ["metrics.jsonl", "summary.json", "recipe.yaml"])
def test_a_missing_file_is_left_out_with_a_line_saying_so(tmp_path, missing):
    folder = whole(tmp_path / "run")
    (folder / missing).unlink()
    shown = Page(write_report(folder).read_text()).text
    assert f"Left out {missing} is not there, so" in shown


def test_an_empty_folder_still_gives_a_page(tmp_path):
    (tmp_path / "bare").mkdir()
    shown = Page(write_report(tmp_path / "bare").read_text()).text
    assert "bare Unfinished" in shown
    assert "No evaluation has been summarised." in shown
    assert "No metrics have been logged." in shown
    assert "No sample episodes were kept." in shown


def test_an_unfinished_run_with_a_line_cut_off(tmp_path):
    folder = run_folder(tmp_path / "run", summary={"sets": {"held_out": {"before": SETS["held_out"]["before"]}}})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "phase": "tr')
    shown = Page(write_report(folder).read_text()).text
    assert "Unfinished · step 4 of 4" in shown
    assert "1 line(s) of metrics.jsonl could not be read" in shown
    assert "Not logged in this run: Return, Gradient norm, Groups without signal, Loss" in shown


def test_damaged_files_are_noted_not_raised(tmp_path):
    folder = run_folder(tmp_path / "run", recipe="{[", lines=[{"step": 1, "success": 0.5}])
    (folder / "summary.json").write_bytes(b"\xff\xfe[1")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": "x"}\n{"step": 2, "success": NaN, "loss": null}\n\n')
    run = read_run(folder)
    assert run.series("success") == [(1.0, 0.5)]
    assert len(run.notes) == 3
    Page(page(run))


def test_no_folder_and_no_permission_are_one_line_errors(tmp_path):
    with pytest.raises(RunError, match="there is no run folder"):
        write_report(tmp_path / "none")
    folder = whole(tmp_path / "run")
    (folder / "report.html.part").mkdir()
    with pytest.raises(RunError, match=r"report.html cannot be written"):
        write_report(folder)


def test_base_and_cold_start_evaluations_share_no_place(tmp_path):
    run = read_run(whole(tmp_path / "run"))
    assert [(p.step, p.base) for p in run.evaluations["held_out"]] == [(0, True), (0, False), (4, False)]
    assert [m["learner/loss"] for _, m in run.cold_start] == [1.5, 0.5]
    without = [line for line in metrics() if line["phase"] != "cold_start"]
    run = read_run(run_folder(tmp_path / "plain", lines=without))
    assert not any(p.base for p in run.evaluations["held_out"])


def test_a_step_done_again_after_a_resume_counts_once(tmp_path):
    lines = [{"step": s, "phase": "train", "success": v} for s, v in ((1, 0.1), (2, 0.2), (2, 0.3), (3, 0.4))]
    assert read_run(run_folder(tmp_path / "run", lines=lines)).series("success") == [(1, 0.1), (2, 0.3), (3, 0.4)]


def test_the_curve_is_a_picture_of_its_own(tmp_path):
    path = write_curve_svg(whole(tmp_path / "run"), tmp_path / "curve.svg")
    root = ET.parse(path).getroot()
    assert root.tag.endswith("svg")
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"Success of quick while training", "training batches", "held_out", "base"} <= set(texts)
    titles = [element.text for element in root.iter(f"{SVG}title")]
    assert titles == [
        "held_out, base: 24.0 % (19.0 % to 29.0 %)",
        "held_out, step 0: 30.0 % (25.0 % to 35.0 %)",
        "held_out, step 4: 52.0 % (47.0 % to 57.0 %)",
    ]
    with pytest.raises(RunError, match="no measured success"):
        write_curve_svg(run_folder(tmp_path / "empty", lines=[]), tmp_path / "none.svg")


# -- charts and text -------------------------------------------------------------------------------------------------

few = settings(max_examples=40, deadline=None)
values = st.floats(-1e12, 1e12)


@few
@given(values, values, st.integers(1, 8), st.booleans())
def test_ticks_hold_the_data_between_them(a, b, count, whole_numbers):
    low, high = min(a, b), max(a, b)
    found = ticks(low, high, count, whole=whole_numbers)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert found[0] <= low + slack and found[-1] >= high - slack
    assert len(found) >= 2 and all(x < y for x, y in itertools.pairwise(found))
    assert len(found) <= 2 * count + 3


def test_ticks_are_round():
    assert ticks(0.0, 0.57, 4) == pytest.approx([0, 0.2, 0.4, 0.6])
    assert ticks(0, 60, 12, whole=True) == [5 * i for i in range(13)]
    assert ticks(1, 3, 10, whole=True) == [1, 2, 3]


@few
@given(st.lists(st.tuples(st.integers(0, 10**6), values), min_size=1, max_size=20, unique_by=lambda p: p[0]))
def test_a_chart_is_well_formed_and_inside_its_box(found):
    found.sort()
    for marks in (True, False):
        root = ET.fromstring(draw(Chart("t", [Series("s", found, smooth=True, marks=marks)]), 380, 190))
        drawn = [pair.split(",") for line in root.iter(f"{SVG}polyline") for pair in line.get("points", "").split()]
        drawn += [(dot.get("cx"), dot.get("cy")) for dot in root.iter(f"{SVG}circle")]
        assert drawn
        assert all(0 <= float(x) <= 380 and 0 <= float(y) <= 190 for x, y in drawn)


def test_long_runs_are_thinned_and_keep_their_mean():
    found = [(float(i), float(i % 7)) for i in range(7000)]
    short = thinned(found)
    assert len(short) <= MOST_POINTS
    assert sum(y for _, y in short) / len(short) == pytest.approx(3.0, abs=0.05)
    assert thinned(found[:10]) == found[:10]


@few
@given(st.floats(-100, 100), st.integers(1, 60))
def test_the_running_mean_of_a_constant_is_the_constant(value, n):
    smooth = running_mean([(float(i), value) for i in range(n)])
    assert [x for x, _ in smooth] == list(range(n))
    assert [y for _, y in smooth] == pytest.approx([value] * n)


@few
@given(st.text())
def test_printable_text_has_no_control_character(text):
    shown = printable(text)
    assert all(c in "\n\t" or c.isprintable() or c.isspace() or c in "\u200c\u200d" for c in shown)
    shown.encode("utf-8")


def test_plain_words_are_left_alone():
    assert printable("naïve 日本語 👩\u200d🔬\tx\n") == "naïve 日本語 👩\u200d🔬\tx\n"
    assert printable("abcdef", limit=4) == "abcd … (2 more characters)"
    assert printable("\x1b\u2028\U000e0001") == "\\x1b\\u2028\\U000e0001"


def test_numbers_in_words():
    assert [number(v) for v in (0, 0.123456, 4218, 2.5e6, 1e10, -3e-5)] == [
        "0",
        "0.123",
        "4.22k",
        "2.5M",
        "10G",
        "-3e-05",
    ]
    assert number(math.nan) == "–"
    assert [duration(s) for s in (0, 59.6, 754, 3725)] == ["0 s", "1 min 00 s", "12 min 34 s", "1 h 02 min"]
    assert [points(v) for v in (0.251, -0.04)] == ["+25.1", "−4.0"]


def test_a_page_needs_no_file_at_all(tmp_path):
    assert "Renma training report" in page(RunData(tmp_path))


def test_what_an_algorithm_logs_besides_and_warnings_of_collapse_are_shown(tmp_path):
    lines = [{"step": s, "phase": "train", "critic/explained_variance": 0.1 * s, "return_mean": 1.0} for s in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = "learner/entropy fell from 2 to 0.1 since step 2 <b>"
    events = [{"event": "resumed", "step": 1}, {"event": "collapse", "step": 3, "text": text}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run = read_run(tmp_path)
    assert run.warnings == [(3, text)]
    shown = Page(page(run))
    assert "Step 3: learner/entropy fell from 2 to 0.1 since step 2 <b>." in shown.text and "b" not in shown.tags
    assert "Critic: explained variance" in shown.text and "Preference loss" not in shown.text


def test_a_share_that_is_always_zero_has_no_axis_below_zero():
    flat = [(1.0, 0.0), (2.0, 0.0)]
    text = draw(Chart("Clipped tokens", [Series("clipped", flat, 1)], True, True), 380, 190)
    assert "100 %" in text and "-50" not in text and "\u221250" not in text
