"""The progress view: what a log file, a terminal and a program see."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from renma.training.progress import Progress
from renma.training.progress_text import sparkline, step_line

SETS = {
    "held_out": {
        "before": {"success": 0.24, "low": 0.2, "high": 0.29, "n": 300},
        "cold_start": {"success": 0.3, "low": 0.25, "high": 0.35, "n": 300},
        "after": {"success": 0.525, "low": 0.47, "high": 0.58, "n": 300},
    }
}
SAMPLES = [
    {
        "task": f"task {i}",
        "return": 1.0,
        "success": i != 1,
        "stop_reason": "step_limit",
        "steps": [{"action": f"Call: calc({i})\n", "observation": f"Result: {i}\n", "reward": 0.0}],
    }
    for i in range(5)
]
METRICS = {
    "step": 3,
    "success": 0.5,
    "return_mean": 0.55,
    "learner/entropy": 1.25,
    "tokens_per_second": 4218.0,
    "tokens_per_second_rollout": 9000.0,
    "seconds_rollout": 3.14,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A Progress, its clock and what it wrote."""

    def __init__(self, mode: str, terminal: bool = False, colours: bool = False) -> None:
        self.file, self.clock = io.StringIO(), Clock()
        console = Console(
            file=self.file, force_terminal=terminal, width=100, color_system="standard" if colours else None
        )
        self.progress = Progress(mode, console=console, clock=self.clock)

    @property
    def text(self) -> str:
        return self.file.getvalue()

    def panel(self) -> str:
        console = Console(file=io.StringIO(), width=100, color_system=None)
        console.print(self.progress._panel())
        return console.file.getvalue()


def run(watched: Watched, samples=SAMPLES) -> str:
    with watched.progress as p:
        p.start("quick [bold]start", [("trajectories per step", "16 x 8 = 128")])
        p.phase("evaluate held_out", 2)
        p.advance(True)
        p.advance(False)
        p.evaluation("held_out before", SETS["held_out"]["before"])
        p.phase("train", 10)
        for step in range(1, 4):
            watched.clock.now += 6
            p.step({**METRICS, "step": step})
        p.note("saved [red]step_3")
        p.finish(
            SETS, samples, "/runs/a very long folder name that must not be broken by the width of a log/report.html"
        )
    return watched.text


def test_a_log_file_gets_one_readable_line_a_step():
    text = run(Watched("auto"))
    assert "\x1b" not in text
    assert text.startswith("quick [bold]start\n")  # no markup is interpreted
    assert "16 x 8 = 128" in text and "saved [red]step_3\n" in text
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    assert len(lines) == 3
    assert lines[-1] == (
        "step  3/10  success 50.0 %  return 0.55  entropy 1.25  tok/s 4.22k  tok/s rollout 9k  rollout 3.1 s  42 s left"
    )
    assert "held_out before: 24.0 % [20.0, 29.0], 300 tasks\n" in text
    assert text.endswith("that must not be broken by the width of a log/report.html\n")


def test_the_end_shows_intervals_and_rls_part_apart():
    rows = [" ".join(line.split()) for line in run(Watched("plain")).splitlines()]
    assert "held_out before 24.0 % [20.0, 29.0]" in rows
    assert "300 tasks after cold start 30.0 % [25.0, 35.0] +6.0" in rows
    assert "after RL 52.5 % [47.0, 58.0] +22.5" in rows
    assert "in all +28.5" in rows


def test_three_samples_with_the_agents_text_told_apart():
    text = run(Watched("plain", terminal=True, colours=True))
    for i in range(3):
        assert f"\x1b[1;32m▌ Call: calc({i})\x1b[0m" in text
        assert f"\x1b[2m  Result: {i}\x1b[0m" in text
    assert "calc(3)" not in text
    assert "episode 2 · not solved · return 1 · step limit" in text
    assert "▌ Call: calc(0)\n  Result: 0\n" in run(Watched("plain"))  # without colours the mark still tells


def test_hostile_text_cannot_steer_the_terminal():
    hostile = [{"task": "\x1b[2J", "steps": [{"action": "\x1b]0;owned\x07 [red]x", "observation": "\u202eevil\r"}]}]
    text = run(Watched("plain"), hostile)
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text and "\r" not in text
    assert "\\x1b]0;owned\\x07 [red]x" in text and "\\u202eevil\\x0d" in text


def test_json_lines():
    records = [json.loads(line) for line in run(Watched("json")).splitlines()]
    assert [r["event"] for r in records] == [
        "start", "phase", "evaluation", "phase", "step", "step", "step", "note", "finish",
    ]  # fmt: skip
    assert records[4]["learner/entropy"] == 1.25 and records[4]["elapsed"] == 6.0
    assert records[2]["set"] == "held_out before" and records[2]["low"] == 0.2
    assert records[-1]["sets"]["held_out"]["after"]["n"] == 300


def test_json_has_no_nan():
    watched = Watched("json")
    watched.progress.step({"step": 1, "loss": math.nan, "parts": [math.inf, 1.0], "event": "spoof"})
    record = json.loads(watched.text, parse_constant=lambda name: pytest.fail(name))
    assert record["loss"] is None and record["parts"] == [None, 1.0] and record["event"] == "step"


def test_quiet_says_only_where_the_report_is():
    assert run(Watched("quiet")).splitlines() == [
        "report: /runs/a very long folder name that must not be broken by the width of a log/report.html"
    ]


def test_the_live_panel():
    watched = Watched("auto", terminal=True)
    p = watched.progress
    p.start("quick", [])
    assert "getting ready" in watched.panel()
    p.phase("evaluate held_out", 40)
    for i in range(10):
        p.advance(i % 2 == 0)
    assert "evaluate held_out" in watched.panel() and "10/40" in watched.panel()
    assert "5 of 10 solved" in watched.panel()
    p.evaluation("held_out before", SETS["held_out"]["before"])
    p.phase("train", 10)
    for step in (1, 2):
        watched.clock.now += 30
        p.step({**METRICS, "step": step, "success": step / 4})
    p.advance(True)
    panel = watched.panel()
    assert "evaluate" not in panel
    assert "2/10" in panel and "4 min 00 s left" in panel and "quick · 1 min 00 s" in panel
    assert "sampling: 1 of 1 solved" in panel
    assert "success 50.0 %" in panel and "entropy 1.25" in panel and "tok/s rollout 9k" in panel
    assert "▃▅" in panel
    p.close()
    p.close()
    assert "\x1b[?25h" in watched.text  # the cursor is back


def test_the_terminal_is_given_back_after_an_error():
    watched = Watched("auto", terminal=True)
    with pytest.raises(KeyboardInterrupt), watched.progress as p:
        p.start("quick", [])
        raise KeyboardInterrupt
    assert watched.text.count("\x1b[?25h") == 1


def test_an_evaluation_between_steps_is_not_counted_as_step_time():
    watched = Watched("plain")
    p = watched.progress
    p.phase("train", 4, done=1)
    watched.clock.now += 10
    p.step({"step": 2})
    p.phase("evaluate held_out", 5)
    watched.clock.now += 1000
    p.evaluation("held_out during", {"success": 0.5})
    watched.clock.now += 10
    p.step({"step": 3})
    assert watched.text.splitlines()[-1] == "step 3/4  10 s left"
    assert "held_out during: 50.0 %\n" in watched.text


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="progress mode 'loud': use one of auto, plain, quiet, json"):
        Progress("loud")


def test_step_line_with_little_to_say():
    assert step_line({"step": 7}, 0, None) == "step 7"
    assert "loss" not in step_line({"step": 7, "loss": None}, 0, None)


def test_sparkline_averages_neighbours():
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert len(sparkline([0.1] * 1000, 60)) <= 60
    assert sparkline([], 10) == ""
    assert sparkline([-3.0, 7.0], 10) == "▁█"
