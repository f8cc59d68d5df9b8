"""Peers of benchmarks/sampling.py as processes that stay up between jobs and stand still while others run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from renma.errors import RunError

FOLDER = Path(__file__).parent / "peers"


class Peer:
    """A process that answers jobs (peers/json_jobs.py). `log` takes what it says besides.

    Its whole process group is stopped between jobs: an engine that spins for work would take time from the others.
    Raises RunError when it ends before it has answered.
    """

    def __init__(self, name: str, command: Sequence[str | Path], log: Path) -> None:
        self.name, self.log = name, log
        began = time.perf_counter()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._answer()
        self.start_seconds = time.perf_counter() - began
        self._signal(signal.SIGSTOP)

    def run(self, path: Path, limited: bool = True) -> dict[str, Any]:
        """The answer to the job in file `path`; limited False: without its token set."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"path": str(path), "limited": limited}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, which: signal.Signals) -> None:
        os.killpg(self._process.pid, which)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RunError(f"{self.name} ended with code {code} before it answered: see the end of {self.log}")
        return dict(json.loads(line))


def python_of(venvs: Path, name: str) -> Path:
    """The interpreter of a peer's environment. Raises RunError when there is none."""
    found = venvs / name / "bin" / "python"
    if not found.exists():
        raise RunError(f"{found} is missing: run `make bench-setup`, or name the folder of environments with --venvs")
    return found.absolute()


def vllm_peer(
    venvs: Path, model: Path, log: Path, *, seqs: int, context: int, threads: int, options: Sequence[str]
) -> Peer:
    command = [python_of(venvs, "vllm"), FOLDER / "vllm_sampling.py", "--model", model, "--seqs", str(seqs)]
    return Peer("vllm", [*command, "--context", str(context), "--threads", str(threads), *options], log)


def hf_peer(venvs: Path, model: Path, log: Path, *, batch: int, threads: int, options: Sequence[str]) -> Peer:
    command = [python_of(venvs, "trl"), FOLDER / "hf_sampling.py", "--model", model, "--batch", str(batch)]
    return Peer("hf", [*command, "--threads", str(threads), *options], log)
