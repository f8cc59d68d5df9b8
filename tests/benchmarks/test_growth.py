"""benchmarks/growth.py and benchmarks/learning.py: that what they compare is the same work, and is counted right."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import growth, learning
from benchmarks.learner_cost import distinct, matmul_peak, size_of, update_flops
from benchmarks.padded_rows import padded_positions, padded_update
from benchmarks.recorded_rows import credited, load_rows, save_rows
from benchmarks.small_multiples import Panel, draw_panels
from benchmarks.tiny_runs import Results
from renma.errors import DataError
from renma.learning.learner import Learner
from renma.learning.lora import apply_lora
from renma.learning.losses import reinforce
from renma.models.policy import Policy
from renma.recipe import LearnerSection, LoraSettings
from tests.learning.tiny import make_model, random_rows

TINY = growth.Shape(tasks=2, group_size=3, turns=2, header=16, question=4, action=2, observation=3, slots=4)


@pytest.fixture(scope="module")
def machine() -> growth.Machine:
    torch.set_num_threads(1)
    return growth.Machine(growth.policy_for(None))


# What is counted


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_flops_are_those_of_the_products_that_torch_counts(kind: str) -> None:
    model = make_model(kind, "eager")
    model.config.final_logit_softcapping = None
    ids = torch.arange(12)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    # Eager attention computes all pairs, hidden ones too: as if every position came after all others.
    size = replace(size_of(model, None), windows=(None, None))
    assert update_flops(size, np.full(12, 11), 12) == counter.get_total_flops()


def test_a_window_and_depth_bound_the_pairs_that_count() -> None:
    size = size_of(make_model("gemma3"), torch.arange(10))
    assert size.windows == (4, None) and size.outputs == 10 and size.attended == 32
    bare = replace(size, windows=())
    depths = np.arange(6)
    pairs = (1 + 2 + 3 + 4 + 4 + 4) + (1 + 2 + 3 + 4 + 5 + 6)
    assert update_flops(size, depths, 3) - update_flops(bare, depths, 3) == 12 * 32 * pairs
    assert update_flops(bare, depths, 3) == 6 * size.body * 6 + 6 * 32 * 10 * 3


def test_frozen_weights_cost_two_products_of_three() -> None:
    model = apply_lora(make_model(), LoraSettings(rank=2))
    size = size_of(model, None)
    whole = size_of(make_model(), None)
    assert not size.head_trained and size.body == whole.body + size.trained
    assert 0 < size.trained < whole.body


def test_the_peak_is_a_rate() -> None:
    assert 1e8 < matmul_peak(seconds=0.05) < 1e16


# The ways that are compared


@pytest.mark.parametrize("output_ids", [None, torch.arange(20)])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_padded_rows_learn_what_the_tree_learns(kind: str, output_ids: torch.Tensor | None) -> None:
    rows = credited(random_rows(5, 9))
    results, weights = [], []
    for padded in (False, True):
        model = make_model(kind)
        learner = Learner(model, LearnerSection(learning_rate=1e-3), output_ids=output_ids)
        if padded:
            results.append(padded_update(learner, rows, 4, output_ids))
        else:
            results.append(learner.update(rows, loss=reinforce()))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for name in ("loss", "grad_norm"):
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-4)
    # Adam's first step is the gradient's sign: where a gradient is nearly 0 it may differ.
    assert float((weights[0] - weights[1]).abs().gt(1e-4).float().mean()) < 0.01


def test_padding_is_counted() -> None:
    rows = random_rows(0, 5)
    lengths = sorted((len(row) for row in rows), reverse=True)
    assert padded_positions(rows, 3) == 3 * (lengths[0] - 1) + 2 * (lengths[3] - 1)


def test_every_trajectory_takes_part() -> None:
    rows = credited(random_rows(0, 6))
    assert all((row.advantages[row.trained] != 0).all() and (row.advantages[~row.trained] == 0).all() for row in rows)


def test_rows_come_back_from_their_file(tmp_path: Path) -> None:
    rows = random_rows(2, 5, groups=2)
    save_rows(tmp_path / "rows.npz", rows)
    again = load_rows(tmp_path / "rows.npz")
    assert len(again) == len(rows)
    for one, other in zip(rows, again, strict=True):
        assert (one.trajectory, one.group) == (other.trajectory, other.group)
        for name in ("ids", "trained", "logprobs", "advantages", "step", "versions"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
    with pytest.raises(DataError, match="no rows at"):
        load_rows(tmp_path / "none.npz")


def test_an_update_is_measured_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny(recipe: Any) -> Policy:
        return Policy(make_model(), None, None, torch.device("cpu"), torch.float32, "tiny")  # type: ignore[arg-type]

    monkeypatch.setattr(learning, "policy_of", tiny)
    monkeypatch.setattr(learning, "matmul_peak", lambda: 1e9)
    rows = credited(random_rows(1, 8, 20, 30))
    found = {
        way: learning.measure("quickstart", "full", "tasks", way, rows, 4) for way in ("tree", "separate", "padded")
    }
    assert found["tree"]["positions"] == found["tree"]["distinct"] == distinct(rows).positions
    assert found["separate"]["positions"] == sum(int(np.flatnonzero(row.trained)[-1]) for row in rows)
    assert found["tree"]["positions"] < found["separate"]["positions"] < found["padded"]["positions"]
    for run in found.values():
        assert run["loss"] == pytest.approx(found["tree"]["loss"], rel=1e-3)
        assert run["mfu"] == pytest.approx(run["flops"] / run["seconds"] / 1e9)
        assert run["seconds"] > 0 and run["memory"] >= 0
    console = Console(record=True, width=170)
    learning.show(list(found.values()), console)
    text = console.export_text()
    assert "separate" in text and "padded" in text


# Growth


def test_both_ways_do_the_same_work_and_only_ours_shares_it(machine: growth.Machine) -> None:
    ours, apart = (machine.step(TINY, way) for way in (growth.OURS, growth.SEPARATE))
    requests = TINY.tasks * TINY.group_size * TINY.turns
    prompts = TINY.tasks * TINY.group_size * sum(20 + turn * 5 for turn in range(TINY.turns))
    assert ours["prompt_positions"] == apart["prompt_positions"] == prompts
    assert prompts - requests <= apart["prefilled"] <= prompts  # a mark's first token may be shared
    assert 0 < ours["prefilled"] < apart["prefilled"] / 3
    assert ours["row_tokens"] == apart["row_tokens"] == TINY.tasks * TINY.group_size * 27
    assert apart["positions"] == TINY.tasks * TINY.group_size * 26
    assert ours["positions"] <= 16 + 2 * 4 + TINY.tasks * TINY.group_size * 6


def test_episodes_have_the_shape_that_was_asked_for(machine: growth.Machine) -> None:
    engine = growth.LocalEngine(machine.policy.model, machine.policy.tokenizer, slots=2, context=growth.longest(TINY))
    trajectories = growth.rollout(engine, TINY, machine.vocabulary, shared=True)
    assert [(int(t.task.id), t.member) for t in trajectories] == [(i, j) for i in range(2) for j in range(3)]
    for trajectory in trajectories:
        assert [len(step.action_ids) for step in trajectory.steps] == [2, 2]
        assert [len(step.prompt_ids) for step in trajectory.steps] == [20, 25]
    headers = {trajectory.steps[0].prompt_ids[:16].tobytes() for trajectory in trajectories}
    assert len(headers) == 1
    assert len(growth.rows_from(trajectories)) == 6


def test_what_is_in_the_file_is_not_measured_again(tmp_path: Path) -> None:
    steps: list[tuple[growth.Shape, str]] = []

    class Counted:
        def step(self, shape: growth.Shape, way: str, *, learns: bool = True) -> dict[str, float]:
            steps.append((shape, way))
            return {"rollout": float(shape.turns + (way == growth.SEPARATE)), **({"learner": 1.0} if learns else {})}

    def go(knobs: dict[str, tuple[int, ...]]) -> list[dict[str, Any]]:
        results = Results(tmp_path / "growth.json")
        growth.measure(Counted(), knobs, 2, results, Console(quiet=True), "m")  # type: ignore[arg-type]
        return list(results.runs.values())

    runs = go({"turns": (1, 4)})
    assert len(runs) == 8 and len(steps) == 8 + 2  # and two to warm up
    go({"turns": (1, 4)})
    assert len(steps) == 10
    runs = go({"turns": (1, 4), "slots": (2,)})
    assert len(steps) == 10 + 2 + 4
    assert growth.medians(runs, "turns", "rollout") == {
        growth.OURS: [(1.0, 1.0), (4.0, 4.0)],
        growth.SEPARATE: [(1.0, 2.0), (4.0, 5.0)],
    }
    assert growth.medians(runs, "slots", "learner") == {}
    text = growth.chart(runs, "<m>")
    assert "&lt;m&gt;" in text and "Slots are the engine" in text
    assert len(ElementTree.fromstring(text).findall(".//{*}polyline")) == 4


def test_one_knob_moves_at_a_time() -> None:
    for knob, value, shape in growth.points(growth.KNOBS):
        assert replace(shape, **{knob: getattr(growth.BASE, knob)}) == growth.BASE
        assert getattr(shape, knob) == value


# The drawing


def labels(svg: str) -> Sequence[tuple[float, str]]:
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return [(float(t.attrib["x"]), t.text or "") for t in found if t.attrib.get("text-anchor") == "middle"]


def test_marks_on_an_axis_do_not_run_into_each_other() -> None:
    line = [(float(2**i), float(i)) for i in range(11)]
    svg = draw_panels("t", "s", ("a", "b"), [Panel("p", "x", {"a": line, "b": [(1.0, 2.0)]})])
    at = sorted(x for x, text in labels(svg) if text.isdigit())
    assert len(at) >= 4 and min(np.diff(at)) >= 26
    assert "1024" in [text for _, text in labels(svg)]
    circles = ElementTree.fromstring(svg).findall(".//{*}circle/{*}title")
    assert len(circles) == 12
