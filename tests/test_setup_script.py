"""scripts/setup.sh on machines that differ, played by small programs in place of python, pip and apt-get."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Plays python and pip: notes each pip call in $LOG, fails the calls that match $FAIL.
PYTHON = """#!/bin/bash
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"m.version('torch')"*) exit 1 ;;
  *"pip --disable"*) echo "pip ${@:5}" >> "$LOG" ;;
esac
[ -z "$FAIL" ] || ! [[ "$*" =~ $FAIL ]]
"""
APT = """#!/bin/bash
echo "apt-get $*" >> "$LOG"
exit ${APT_STATUS:-0}
"""


class Machine:
    def __init__(self, folder: Path) -> None:
        self.project, self.programs, self.log = folder / "project", folder / "bin", folder / "log"
        (self.project / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup.sh", self.project / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.project)
        self.programs.mkdir()
        self.program("python3.11", PYTHON)
        self.program("apt-get", APT)
        self.program("id", "#!/bin/bash\necho 0\n")
        self.program("nvidia-smi", "#!/bin/bash\nexit 1\n")
        self.program("uname", "#!/bin/bash\necho Linux\n")

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def set_up(self, *extras: str, **environment: str) -> tuple[int, str, list[str]]:
        """(exit code, what was printed, the calls of pip and apt-get)."""
        self.log.write_text("")
        run = subprocess.run(
            ["bash", "scripts/setup.sh", *extras],
            cwd=self.project,
            env={"PATH": f"{self.programs}:/usr/bin:/bin", "LOG": str(self.log), "HOME": os.devnull} | environment,
            capture_output=True,
            text=True,
        )
        return run.returncode, run.stdout + run.stderr, self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_local_wheel_of_torch_comes_first_and_a_second_call_does_nothing(machine: Machine) -> None:
    code, said, calls = machine.set_up("dev", "gemma")
    assert code == 0, said
    assert len(calls) == 2
    assert "--no-index" in calls[0] and calls[0].endswith("torch==2.13.0")
    assert calls[1].endswith("-e .[dev,gemma]")
    assert machine.set_up("dev", "gemma") == (0, "", [])
    assert machine.set_up() == (0, "", [])  # less than what is there
    (machine.project / "pyproject.toml").write_text("changed")
    assert machine.set_up()[2][-1].endswith("-e .")


def test_then_the_index_of_cpu_builds_and_only_then_the_large_one(machine: Machine) -> None:
    _, _, calls = machine.set_up(FAIL="--no-index")
    assert [("whl/cpu" in call, call.split()[-1]) for call in calls[1:]] == [(True, "torch==2.13.0+cpu"), (False, ".")]
    shutil.rmtree(machine.project / ".venv")
    code, said, calls = machine.set_up(FAIL="--no-index|whl/cpu")
    assert code == 0 and "a CUDA build of several GB" in said
    assert "index" not in calls[2] and calls[2].endswith("torch==2.13.0")


def test_a_gpu_machine_gets_the_plain_wheel(machine: Machine) -> None:
    machine.program("nvidia-smi", "#!/bin/bash\n")
    _, _, calls = machine.set_up()
    assert len(calls) == 2 and "index" not in calls[0]


def test_a_system_package_is_installed_or_named_with_what_it_costs(machine: Machine) -> None:
    code, said, calls = machine.set_up(FAIL="ensurepip", APT_STATUS="1")
    assert code == 1
    assert "missing: python3.11-venv (makes the virtual environment; without it nothing can be installed)" in said
    assert "apt-get install python3.11-venv" in said.splitlines()[-1]
    assert calls == ["apt-get update -qq"] * 2  # also under the name python3-venv
    assert not (machine.project / ".venv").exists()


def test_a_set_up_that_fails_is_done_again(machine: Machine) -> None:
    code, _, _ = machine.set_up(FAIL="-e [.]")
    assert code != 0
    code, _, calls = machine.set_up()
    assert code == 0 and calls[-1].endswith("-e .")
