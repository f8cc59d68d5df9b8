"""A vLLM server as a child process, reached through a socket in a folder that only this user can enter."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import httpx

from renma.errors import ModelError
from renma.inference.vllm import launch, worker
from renma.inference.vllm.backend import Settings

WORKER_MODULE = "renma_vllm_worker"
POLL_SECONDS = 0.25
STOP_SECONDS = 20.0
LOG_LINES = 4


class ServerChild:
    """vLLM's server, run by `python`, which needs vllm and not Renma.

    Raises ModelError when that Python is not there.
    """

    def __init__(self, python: str, settings: Settings) -> None:
        found = shutil.which(os.path.expanduser(python))
        if found is None:
            raise ModelError(f"rollout.engine.python: there is no program {python!r}; give a Python that has vllm")
        # Not resolved: a virtual environment's python is a link, and known by where the link is.
        self._python = str(Path(found).absolute())
        self._settings = settings
        self._folder: Path | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def socket(self) -> str:
        assert self._folder is not None
        return str(self._folder / "http")

    @property
    def log(self) -> Path:
        assert self._folder is not None
        return self._folder / "log"

    async def start(self, model: Path) -> None:
        """Return when the server answers. Raises ModelError, with the end of its log, when it does not come up."""
        self._folder = Path(tempfile.mkdtemp(prefix="renma-vllm-"))
        shutil.copyfile(worker.__file__, self._folder / f"{WORKER_MODULE}.py")
        arguments = self._settings.engine_arguments(model, f"{WORKER_MODULE}.WeightReader")
        arguments |= {"uds": self.socket, "served_model_name": "policy", "disable_uvicorn_access_log": True}
        command = [self._python, launch.__file__, str(os.getpid()), *command_line(arguments)]
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,  # Ctrl-C is for Renma, which then stops it in order
            )
        try:
            await self._until_ready(self._process)
        except BaseException:
            await self.stop()
            raise

    def _environment(self) -> dict[str, str]:
        """This process's, with what a server needs; never Renma's own packages, which may be of other versions."""
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        # Development mode has the addresses that load weights and end requests; nobody else can reach the socket.
        needed = {"PYTHONPATH": str(self._folder), "VLLM_SERVER_DEV_MODE": "1"}
        return self._settings.environment | own | needed

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        loop = asyncio.get_running_loop()
        patience = loop.time() + self._settings.start_seconds
        transport = httpx.AsyncHTTPTransport(uds=self.socket)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=5) as client:
            while True:
                try:
                    if (await client.get("/health")).is_success:
                        return
                except httpx.TransportError:
                    pass  # not listening yet
                if process.returncode is not None or loop.time() > patience:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), POLL_SECONDS)
        what = "ended" if process.returncode is not None else f"was not ready after {self._settings.start_seconds:g} s"
        raise ModelError(f"the vllm server {what}: {self._last_lines()}; check rollout.engine.python and args")

    def _last_lines(self) -> str:
        """The lines of the log that most likely say what went wrong, on one line."""
        lines = [line.strip() for line in self.log.read_text("utf-8", "replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return " | ".join((errors or lines)[-LOG_LINES:])[-600:]

    async def stop(self) -> None:
        """End the server, its workers and its folder."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)  # its own session: the workers too
                await process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None


def command_line(arguments: dict[str, Any]) -> list[str]:
    """Engine arguments by their Python names, as vLLM's server takes them: --max-model-len 256 --enforce-eager …"""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words
