"""The command line as a user meets it: every mistake is one line with the fix, and an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from renma.cli import app
from tests.end_to_end.tiny import TINY

runner = CliRunner()


def renma(*arguments: str) -> tuple[int, str]:
    result = runner.invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def one_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("renma: ")]
    assert len(lines) == 1, output
    assert "Traceback" not in output
    return lines[0]


def recipe(folder: Path, **changes: object) -> str:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "cold_start": None, "training": {"steps": 1}, **changes}))
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    code, output = renma("train", recipe(folder), "--output", str(folder), "--progress", "plain")
    assert code == 0, output
    return folder / "tiny"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no"),
        ("", "is empty"),
        ('{"question": "1 + 1", "answer": 2}\nnot json\n', "line 2"),
        ('{"qestion": "1 + 1", "answer": 2}\n', "question"),
    ],
)
def test_bad_data_files(tmp_path: Path, content: str | None, message: str) -> None:
    data = tmp_path / "data.jsonl"
    if content is not None:
        data.write_text(content)
    tasks = {"type": "jsonl", "path": str(data)}
    code, output = renma("train", recipe(tmp_path, tasks=tasks), "--output", str(tmp_path / "runs"))
    assert code == 3
    assert message in one_line(output)
    assert not list((tmp_path / "runs").glob("*")), "nothing half-written"


def test_a_model_folder_without_a_tokenizer(tmp_path: Path, run: Path) -> None:
    policy = run / "checkpoints" / "step_1" / "policy"
    copy = tmp_path / "model"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((policy / name).read_bytes())
    model = {"type": "pretrained", "source": str(copy)}
    code, output = renma("train", recipe(tmp_path, model=model), "--output", str(tmp_path / "runs"))
    assert code == 4
    assert "tokenizer" in one_line(output)
    assert not list((tmp_path / "runs").glob("*"))


def test_a_prompt_longer_than_the_context(tmp_path: Path) -> None:
    agent = {"renderer": {"type": "plain", "header": "1 + 2 = 3\n" * 100}}
    code, output = renma("train", recipe(tmp_path, agent=agent), "--output", str(tmp_path / "runs"))
    assert code != 0
    assert "context" in one_line(output)


def test_a_read_only_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, output = renma("train", recipe(tmp_path), "--output", str(tmp_path / "file"))
    assert code == 5
    assert "choose another" in one_line(output)


def test_unknown_key_and_unknown_recipe(tmp_path: Path) -> None:
    code, output = renma("train", recipe(tmp_path), "training.stesp=3", "--output", str(tmp_path))
    assert code == 2
    assert "did you mean 'steps'" in one_line(output)
    code, output = renma("train", "quickstrat")
    assert code == 2
    assert "did you mean 'quickstart'" in one_line(output)


def test_resume_of_what_is_no_run(tmp_path: Path) -> None:
    code, output = renma("resume", str(tmp_path))
    assert code == 5
    assert "is not a run" in one_line(output)


def test_eval_of_a_run_and_of_a_model(run: Path, tmp_path: Path) -> None:
    code, output = renma("eval", str(run), "--k", "3", "--save", str(tmp_path / "r.json"))
    assert code == 0, output
    (result,) = json.loads((tmp_path / "r.json").read_text())
    assert (result["set"], result["n"], result["k"]) == ("held-out", 8, 3)
    model = str(run / "checkpoints" / "step_1" / "policy")
    code, output = renma("eval", model, "--recipe", str(run / "recipe.yaml"), "--limit", "2")
    assert code == 0, output
    assert "held-out" in output
    code, output = renma("eval", "nowhere")
    assert code == 2
    assert "--recipe" in one_line(output)


def test_case_9_2_rollouts_can_be_seen_and_exported(run: Path) -> None:
    code, output = renma("rollout", str(run), "-n", "2")
    assert code == 0, output
    assert output.count("return") == 2
    code, output = renma("rollout", str(run), "--jsonl")
    line = json.loads(output)
    assert {"steps", "status", "stop_reason", "rewards"} <= set(line)
    step = line["steps"][0]
    assert len(step["ids"]) == len(step["mask"])
    assert sum(step["mask"]) == len(step["logprobs"])
    code, output = renma("rollout", str(run), "--set", "held-out", "--tokens")
    assert code == 0 and "observed" in output and "logprob" in output


def test_plan_algorithm() -> None:
    code, output = renma("plan", "algorithm", "--horizon", "30", "--reward", "sparse", "--verifiable")
    assert code == 0, output
    assert output.index("ppo") < output.index("steppo")
    assert "preset: ppo" in output
    code, output = renma("plan", "algorithm", "quickstart", "--steps", "explicit", "--json")
    data = json.loads(output)
    assert data["situation"]["horizon"] == 6 and data["candidates"][0]["preset"] == "steppo"
    assert data["keys"]["algorithm"]["preset"] == "steppo"
    assert {reason["input"] for reason in data["candidates"][0]["reasons"]} == {"steps"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reward", "dens"], "did you mean 'dense'"),
        (["--horizon", "0"], "--horizon 0"),
        (["--model-size", "big"], "--model-size 'big'"),
        (["--no-online"], "no algorithm fits"),
        (["quickstrat"], "did you mean 'quickstart'"),
    ],
)
def test_plan_algorithm_of_what_cannot_be(options: list[str], message: str) -> None:
    code, output = renma("plan", "algorithm", *options)
    assert code == 2
    assert message in one_line(output)


@pytest.mark.parametrize(
    "kind",
    [
        "environments", "algorithms", "recipes", "models", "tasks", "rewards", "estimators", "losses", "corrections",
        "selections", "preferences", "engines",
    ],
)  # fmt: skip
def test_list(kind: str) -> None:
    code, output = renma("list", kind)
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    assert any(name for name, _ in rows)
    assert all(description for _, description in rows), output


def test_list_of_an_unknown_kind() -> None:
    code, output = renma("list", "enviroments")
    assert code == 1
    assert "did you mean 'environments'" in one_line(output)


def test_doctor() -> None:
    code, output = renma("doctor")
    assert code == 0
    assert "torch" in output


def test_new_environment(tmp_path: Path) -> None:
    code, output = renma("new", "environment", "my_shop", "--folder", str(tmp_path))
    assert code == 0, output
    assert (tmp_path / "my_shop.py").exists()
    assert "environment" in output
    code, output = renma("new", "environment", "my shop", "--folder", str(tmp_path))
    assert code != 0
    code, output = renma("new", "spaceship", "x")
    assert code == 1 and "renma new environment x" in one_line(output)
