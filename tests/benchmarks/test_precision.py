"""The benchmark of number types on the smallest recipe: what is written, what is skipped, what is shown."""

from __future__ import annotations

import io
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from benchmarks import precision
from benchmarks.tiny_runs import Results
from tests.end_to_end.tiny import TINY


@pytest.fixture
def arguments(tmp_path: Path) -> Namespace:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(TINY), encoding="utf-8")
    return Namespace(
        recipes=[str(recipe)],
        set=[],
        dtypes=["float32", "int8"],
        runs=1,
        tokens=4,
        concurrency=[1, 3],
        quick=True,
        policies=tmp_path,
    )


def test_a_finished_run_is_written_once_and_shown(arguments: Namespace, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    text = Console(file=io.StringIO(), width=160)
    results = Results(tmp_path / "precision.json")
    [name] = arguments.recipes
    precision.measure(name, arguments, results, text)
    exact, rounded = results.runs[f"{name}/float32/0"], results.runs[f"{name}/int8/0"]
    assert exact["mismatch_max"] < 1e-5 < rounded["mismatch_mean"] < 0.1
    assert exact["extra_megabytes"] == 0 < rounded["extra_megabytes"] < exact["megabytes"] / 3
    assert min(exact["tokens_per_second_1"], rounded["tokens_per_second_3"]) > 0

    again = Results(tmp_path / "precision.json")
    said = text.file.getvalue().count("at once,")  # type: ignore[attr-defined]
    precision.measure(name, arguments, again, text)
    assert text.file.getvalue().count("at once,") == said == 4  # type: ignore[attr-defined]
    precision.show(again, text)
    shown = text.file.getvalue()  # type: ignore[attr-defined]
    assert "float32 (1)" in shown and "int8 (1)" in shown and "tokens/s, 3 at once" in shown


def test_emulated_bfloat16_is_left_out_for_a_large_model_alone(
    arguments: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Console(file=io.StringIO(), width=160)
    parts = precision.parts_of(arguments.recipes[0], arguments, text)
    arguments.dtypes = None
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device: False)
    assert precision.kinds_for(parts, arguments, text) == ["float32", "bfloat16", "int8"]
    monkeypatch.setattr(precision, "LARGE", 1000)
    assert precision.kinds_for(parts, arguments, text) == ["float32", "int8"]
    assert "left out" in text.file.getvalue()  # type: ignore[attr-defined]
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device: True)
    assert precision.kinds_for(parts, arguments, text) == ["float32", "bfloat16", "int8"]
