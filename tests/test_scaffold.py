from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from renma.errors import RenmaError, RunError
from renma.recipe import Component
from renma.registry import load_object
from renma.scaffold import new_environment, recipe_lines


def test_what_is_written_runs_green_and_is_clean(tmp_path: Path) -> None:
    written = new_environment("number_game", tmp_path)
    assert written == [tmp_path / "number_game.py", tmp_path / "test_number_game.py"]
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(root)}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert run.returncode == 0 and "3 passed" in run.stdout, run.stdout
    config = str(root / "pyproject.toml")
    for check in (["check"], ["format", "--check"]):
        ruff = subprocess.run(
            [sys.executable, "-m", "ruff", *check, "--config", config, "--no-cache", *map(str, written)],
            capture_output=True,
            text=True,
        )
        assert ruff.returncode == 0, ruff.stdout


def test_the_recipe_lines_find_the_parts(tmp_path: Path) -> None:
    new_environment("shop2", tmp_path)
    lines = yaml.safe_load(recipe_lines("shop2", tmp_path))
    tasks = Component(**lines["tasks"])
    source = load_object(tasks.type)(**tasks.options)
    environment = load_object(Component(**lines["environment"]).type)()
    assert len(source) == 1000
    assert environment.reset(source[3]) == source[3].prompt
    assert "shop2.py:Shop2Tasks" in (tmp_path / "shop2.py").read_text()


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("my-shop", "my_shop"),
        ("MyShop", "my_shop"),
        ("2048", "my_environment"),
        ("../evil", "evil"),
        ("", "my_environment"),
        ("random", "random_environment"),
        ("class", "class_environment"),
        ("a b", "a_b"),
        ("練磨", "my_environment"),
        ("x;import os", "x_import_os"),
    ],
)
def test_a_bad_name_is_answered_with_a_good_one(tmp_path: Path, name: str, valid: str) -> None:
    with pytest.raises(RenmaError, match=f"a valid name is '{valid}'$"):
        new_environment(name, tmp_path)
    assert list(tmp_path.iterdir()) == []
    new_environment(valid, tmp_path)


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text("mine")
    with pytest.raises(RunError, match=r"test_shop\.py is there already"):
        new_environment("shop", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["test_shop.py"]
    with pytest.raises(RunError, match="cannot write in .*; choose another --folder"):
        new_environment("shop", tmp_path / "test_shop.py")
