from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from renma import doctor
from renma.doctor import Check, checks, render


def shown(found: list[Check], width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_missing_thing_comes_with_how_to_get_it() -> None:
    found = checks()
    names = [check.name for check in found]
    assert len(set(names)) == len(names)
    assert {"Python", "torch", "processor", "bfloat16", "threads", "disk", "GPU", "bubblewrap", "docker", "data"} <= {
        *names
    }
    assert all(check.detail for check in found)
    assert all(check.fix for check in found if not check.ok)
    assert [check.ok for check in found if check.needed] == [True, True]  # or this test would not run
    assert "\n" not in "".join(check.detail + check.fix for check in found)


def test_the_table_shows_the_fix_only_where_it_is_needed() -> None:
    text = shown([Check("alpha", True, "here it is", "FIX A"), Check("beta", False, "gone", "FIX [B]", needed=True)])
    assert "FIX A" not in text and "FIX [B]" in text
    assert "✓" in text and "✗" in text
    assert shown(checks(), width=60)


def test_a_package_that_is_missing_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "_PACKAGES", [("no_such_module", "no-such-thing", "a use", "pip install no-such-thing")]
    )
    monkeypatch.setattr(doctor, "_PROGRAMS", [(("no-such-program", "sh"), "shell", "another use", "buy one")])
    package, program = doctor._extras()
    assert package == Check("no-such-thing", False, "a use", "pip install no-such-thing")
    assert program.ok and program.detail.endswith("sh: another use")


def test_programs_and_data_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("RENMA_DATA", str(tmp_path))
    assert not doctor._docker().ok and "apt-get" in doctor._docker().fix
    assert not doctor._data().ok and "RENMA_DATA" in doctor._data().fix
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / "mawps_train.jsonl").write_text("{}\n")
    assert doctor._data().ok and doctor._data().detail.startswith(str(tmp_path))
    client = tmp_path / "docker"
    client.write_text("#!/bin/sh\n")
    client.chmod(0o755)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    assert doctor._docker().ok


def test_memory_and_cores_are_plausible() -> None:
    memory = doctor._memory()
    if memory is not None:
        assert 0 < memory[1] <= memory[0]
    assert 1 <= doctor._cores() <= (os.cpu_count() or 1)
