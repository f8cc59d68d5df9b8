from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from renma.errors import ModelError, RunError
from renma.models.folders import SIDECAR, cache_root, cached_model, one_line, written_aside


def hidden(folder: Path) -> list[str]:
    return [f.name for f in folder.iterdir() if f.name.startswith(".") and not f.name.endswith(".lock")]


def test_cache_root_is_the_argument_then_the_variable_then_home(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RENMA_CACHE", raising=False)
    assert cache_root() == Path.home() / ".cache" / "renma"
    monkeypatch.setenv("RENMA_CACHE", str(tmp_path / "variable"))
    assert cache_root() == tmp_path / "variable"
    assert cache_root(tmp_path / "given") == tmp_path / "given"


def test_a_model_is_converted_once(tmp_path: Path) -> None:
    calls = []

    def convert(folder: Path) -> None:
        calls.append(folder)
        (folder / "weights").write_text("w")

    first, second = cached_model("m", convert, tmp_path), cached_model("m", convert, tmp_path)
    assert first == second == tmp_path / "models" / "m"
    assert (first / "weights").read_text() == "w"
    assert len(calls) == 1 and calls[0] != first, "converted once, and aside"
    assert hidden(first.parent) == []


def test_a_second_caller_waits_for_the_first_and_never_sees_half_a_model(tmp_path: Path) -> None:
    converting, go_on = threading.Event(), threading.Event()
    calls: list[str] = []
    results: list[Path] = []

    def convert(folder: Path) -> None:
        calls.append("convert")
        (folder / "half").write_text("1")
        converting.set()
        assert go_on.wait(30)
        (folder / "whole").write_text("2")

    def call() -> None:
        results.append(cached_model("m", convert, tmp_path))

    first = threading.Thread(target=call)
    first.start()
    assert converting.wait(30)
    second = threading.Thread(target=call)
    second.start()
    assert not (tmp_path / "models" / "m").exists()
    go_on.set()
    first.join(30)
    second.join(30)
    assert calls == ["convert"]
    assert results == [tmp_path / "models" / "m"] * 2
    assert (results[0] / "whole").is_file()


def test_processes_at_once_convert_once(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from renma.models.folders import cached_model
root = Path(sys.argv[1])
def convert(folder):
    with open(root / "log", "a") as log:
        log.write("x")
    for part in range(20):
        (folder / f"part{part}").write_bytes(b"0" * 100_000)
print("ready", flush=True)
sys.stdin.readline()
folder = cached_model("m", convert, root)
print(sum(f.stat().st_size for f in folder.iterdir()), flush=True)
"""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    assert [child.communicate(timeout=60)[0] for child in children] == ["2000000\n"] * 3
    assert (tmp_path / "log").read_text() == "x"


def test_where_locks_do_not_work_the_first_to_finish_wins(tmp_path: Path) -> None:
    final = tmp_path / "models" / "m"

    def convert(folder: Path) -> None:
        (folder / "weights").write_text("late")
        final.mkdir()
        (final / "weights").write_text("early")

    assert cached_model("m", convert, tmp_path) == final
    assert (final / "weights").read_text() == "early"
    assert hidden(final.parent) == []


def test_what_a_killed_process_left_is_cleared_and_not_used(tmp_path: Path) -> None:
    left = tmp_path / "models" / ".m.making-1-abc"
    left.mkdir(parents=True)
    (left / "weights").write_text("half")
    folder = cached_model("m", lambda f: (f / "weights").write_text("whole") and None, tmp_path)
    assert (folder / "weights").read_text() == "whole"
    assert not left.exists()


def test_a_failed_conversion_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise ModelError("no")

    with pytest.raises(ModelError, match="^no$"):
        cached_model("m", fail, tmp_path)
    assert not (tmp_path / "models" / "m").exists() and hidden(tmp_path / "models") == []
    assert cached_model("m", lambda f: None, tmp_path).is_dir()


@pytest.mark.parametrize("message", ["No space left on device", "Read-only file system"])
def test_a_cache_that_cannot_be_written_is_one_line_with_the_fix(tmp_path: Path, message: str) -> None:
    def fail(folder: Path) -> None:
        raise OSError(28, message)

    with pytest.raises(ModelError, match="RENMA_CACHE") as caught:
        cached_model("m", fail, tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_in_the_caches_place_is_one_line_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ModelError, match="RENMA_CACHE"):
        cached_model("m", lambda f: None, tmp_path / "cache")


def test_written_aside_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "model"
    with written_aside(folder) as aside:
        (aside / SIDECAR).write_text("1")
        assert not folder.exists() and aside.parent == folder.parent
    assert (folder / SIDECAR).read_text() == "1"
    with pytest.raises(ZeroDivisionError), written_aside(folder) as aside:
        (aside / SIDECAR).write_text("2")
        raise ZeroDivisionError
    assert (folder / SIDECAR).read_text() == "1", "the old one stays when the new one fails"
    with written_aside(folder) as aside:
        (aside / SIDECAR).write_text("3")
    assert (folder / SIDECAR).read_text() == "3"
    assert hidden(folder.parent) == []


def test_written_aside_spares_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="another folder"), written_aside(tmp_path):
        raise AssertionError("the block must not run")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_full_disk_is_one_line_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="free space") as caught, written_aside(tmp_path / "m"):
        raise OSError(28, "No space left on device")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_one_line() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 500))) == 200
