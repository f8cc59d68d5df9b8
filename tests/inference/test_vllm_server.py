"""The vllm engine over HTTP: a server that is there, and one that Renma starts and ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from renma.errors import ModelError, RunError
from renma.inference import SamplingParams
from renma.inference.vllm import launch
from renma.inference.vllm.backend import Settings
from renma.inference.vllm.child import ServerChild, command_line
from renma.inference.vllm.engine import VllmEngine
from renma.inference.vllm.server import ServerBackend
from renma.inference.vllm.weights import PolicyFiles
from tests.inference import fake_vllm
from tests.inference.fake_vllm import HOLD, FakeVllm
from tests.inference.tiny_models import VOCABULARY, byte_tokenizer, make

TOKENIZER = byte_tokenizer()
SETTINGS = Settings(96, 4, output_ids=(4, 5, 6))


def engine_over(backend: ServerBackend) -> VllmEngine:
    return VllmEngine(backend, PolicyFiles(make("llama"), TOKENIZER), TOKENIZER, context=96, vocabulary=VOCABULARY)


def with_server(work: Callable[[FakeVllm, VllmEngine], Awaitable[None]], **options: Any) -> FakeVllm:
    server = FakeVllm(**options)

    async def main() -> None:
        address = await server.listen()
        engine = engine_over(ServerBackend(SETTINGS, address=address))
        try:
            await work(server, engine)
        finally:
            await engine.close()
            await server.close()

    asyncio.run(main())
    return server


def test_ids_go_there_and_ids_with_logprobs_come_back() -> None:
    async def work(server: FakeVllm, engine: VllmEngine) -> None:
        params = SamplingParams(0.7, max_tokens=6, stop_ids=(23,), stop_strings=("zz",), seed=9)
        sample = await engine.sample([8, 9, 10], params)
        assert sample.ids.tolist() == [21, 22, 23]
        assert sample.logprobs.tolist() == [-2.0] * 3 and sample.stop_reason == "stop"

    server = with_server(work, stubborn=2)
    assert server.loads == 1, "it was started by somebody else: it gets the policy's weights before the first request"
    assert server.resets == 3, "until it says that it has forgotten"
    _path, body = next(entry for entry in server.asked if entry[0] == "/v1/completions")
    sent = {"prompt": [8, 9, 10], "temperature": 0.7, "seed": 9, "stop": ["zz"], "stop_token_ids": [23], "logprobs": 0}
    assert sent.items() <= body.items()
    assert body["allowed_token_ids"] == [4, 5, 6] and body["ignore_eos"] is True and body["model"] == "policy"


def test_weights_change_under_a_request() -> None:
    async def work(server: FakeVllm, engine: VllmEngine) -> None:
        running = asyncio.create_task(engine.sample([10], SamplingParams(max_tokens=5, seed=HOLD)))
        await server.arrived.wait()
        await engine.load_weights(1)
        sample = await running
        assert sample.ids.tolist() == [21, 22, 23, 44, 45]
        assert sample.logprobs.tolist() == [-2.0, -2.0, -2.0, -3.0, -3.0]
        assert sample.versions.tolist() == [0, 0, 0, 1, 1]

    server = with_server(work)
    paths = [path for path, _ in server.asked]
    changing = paths[paths.index("/abort_requests") :]
    assert changing == ["/abort_requests", "/collective_rpc", "/reset_prefix_cache", "/v1/completions"]


def test_a_cancelled_request_is_closed_at_the_server() -> None:
    async def work(server: FakeVllm, engine: VllmEngine) -> None:
        running = asyncio.create_task(engine.sample([10], SamplingParams(max_tokens=5, seed=HOLD)))
        await server.arrived.wait()
        server.arrived.clear()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await server.arrived.wait()
        assert len(server.ended_early) == 1

    with_server(work)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"broken": (400, "out of vocabulary")}, ModelError, "answered POST /v1/completions with 400: .*out of vocab"),
        ({"broken": (500, "dead")}, RunError, "with 500: .*dead"),
        ({"answer": b"<html>"}, RunError, "with no JSON"),
        ({"answer": []}, RunError, "with no JSON object"),
        ({"answer": {"choices": []}}, RunError, "holds no completion"),
        ({"answer": {"choices": [{"finish_reason": "stop"}]}}, RunError, "gave no token ids"),
        (
            {"answer": {"choices": [{"finish_reason": "stop", "token_ids": ["__import__('os')"]}]}},
            RunError,
            "gave no token ids",
        ),
        ({"answer": {"choices": [{"finish_reason": "repetition"}]}}, RunError, "ended a request with 'repetition'"),
    ],
)
def test_what_a_server_answers_instead_of_a_completion(change: dict[str, Any], kind: Any, message: str) -> None:
    async def work(server: FakeVllm, engine: VllmEngine) -> None:
        await engine.load_weights(0)
        for name, value in change.items():
            setattr(server, name, value)
        with pytest.raises(kind, match=message):
            await engine.sample([10], SamplingParams(max_tokens=5))

    with_server(work)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 64}, "takes 64 tokens of context and the policy 96: start it with --max-model-len 96"),
        ({"development": False}, "has no /collective_rpc: start it with VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_server_that_was_started_wrongly_is_told_apart(options: dict[str, Any], message: str) -> None:
    async def work(server: FakeVllm, engine: VllmEngine) -> None:
        with pytest.raises(ModelError, match=message):
            await engine.sample([10], SamplingParams())

    with_server(work, **options)


def test_a_server_without_the_worker_class_is_told_apart() -> None:
    async def work(server: FakeVllm, engine: VllmEngine) -> None:
        server.broken = (500, "WeightReader has no attribute")
        with pytest.raises(RunError, match="was it started with --worker-extension-cls"):
            await engine.sample([10], SamplingParams())

    with_server(work)


def test_no_server_at_all() -> None:
    engine = engine_over(ServerBackend(SETTINGS, address="http://127.0.0.1:9"))
    with pytest.raises(RunError, match="does not answer GET /v1/models .*is it running"):
        asyncio.run(engine.sample([10], SamplingParams()))


# ---- a server of Renma's own


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A Python that finds a package `vllm` whose server is the stand-in."""
    package = tmp_path / "packages" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "api_server.py").write_text(Path(fake_vllm.__file__).read_text())
    script = tmp_path / "python"
    packages = tmp_path / "packages"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_a_child_is_started_used_and_ended(python: str) -> None:
    child = ServerChild(python, Settings(96, 4, arguments={"enforce_eager": True}))
    engine = engine_over(ServerBackend(SETTINGS, child=child))

    async def main() -> None:
        sample = await engine.sample([10], SamplingParams(max_tokens=2))
        assert sample.ids.tolist() == [11, 12], "it began with the policy's weights: nothing was loaded"
        await engine.load_weights(1)
        assert (await engine.sample([10], SamplingParams(max_tokens=1))).ids.tolist() == [21]
        log = child.log.read_text()
        assert "config.json" in log and "tokenizer.json" in log and "model.safetensors" in log
        arguments = json.loads(log.partition("arguments ")[2].splitlines()[0])
        at = arguments.index("--worker-extension-cls")
        assert arguments[at + 1] == "renma_vllm_worker.WeightReader"
        assert (child.log.parent / "renma_vllm_worker.py").is_file(), "its Python need not have Renma"
        assert "--enforce-eager" in arguments and "--max-num-seqs" in arguments
        folder, process = child.log.parent, child._process
        assert folder.stat().st_mode & 0o077 == 0, "only this user reaches the socket"
        await engine.close()
        assert process is not None and process.returncode is not None
        assert not folder.exists()

    asyncio.run(main())


def test_a_child_that_does_not_come_up_says_why(python: str) -> None:
    settings = Settings(96, 4, arguments={"fail": "yes"})
    child = ServerChild(python, settings)
    engine = engine_over(ServerBackend(settings, child=child))
    with pytest.raises(ModelError, match="the vllm server ended: .*ValueError: this model is too large"):
        asyncio.run(engine.sample([10], SamplingParams()))


def test_a_start_that_is_withdrawn_leaves_no_child(python: str) -> None:
    settings = Settings(96, 4, arguments={"fail": "never"})
    child = ServerChild(python, settings)
    engine = engine_over(ServerBackend(settings, child=child))

    async def main() -> None:
        starting = asyncio.create_task(engine.sample([10], SamplingParams(max_tokens=2)))
        while child._process is None:
            await asyncio.sleep(0)
        process, folder = child._process, child.log.parent
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert process.returncode is not None and not folder.exists()

    asyncio.run(main())


def test_a_child_ends_with_a_parent_that_is_killed(python: str, tmp_path: Path) -> None:
    """The parent starts the launcher and is killed outright; the server's end of a pipe closes when it is gone."""
    model = tmp_path / "model"
    model.mkdir()
    parent = (
        "import os, subprocess, sys, signal\n"
        f"child = subprocess.Popen([{python!r}, {launch.__file__!r}, str(os.getpid()), '--model', {str(model)!r}, "
        f"'--max-model-len', '9', '--uds', {str(tmp_path / 's')!r}], stdout=sys.stdout)\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "model has" in process.stdout.readline()
    assert "arguments" in process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert process.stdout.read() == "", "the pipe is closed: the server has ended"


def test_arguments_become_flags() -> None:
    given = {"max_model_len": 5, "enforce_eager": True, "enable_prefix_caching": False, "x": None, "conf": {"a": 1}}
    assert command_line(given) == [
        "--max-model-len", "5", "--enforce-eager", "--no-enable-prefix-caching", "--conf", '{"a": 1}',
    ]  # fmt: skip
