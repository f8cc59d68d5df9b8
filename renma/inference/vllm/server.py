"""A vLLM server, asked over HTTP: ids and log-probabilities both ways, never text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from renma.errors import ModelError, RunError
from renma.inference.base import SamplingParams
from renma.inference.vllm.backend import Part, Settings
from renma.inference.vllm.child import ServerChild
from renma.inference.vllm.in_process import reset_until_done
from renma.models.folders import one_line

CONTROL_SECONDS = 600.0


class ServerBackend:
    """Asks the server at `address`, or one that `child` starts and that ends with this engine.

    A server that was there before needs VLLM_SERVER_DEV_MODE=1 (to load weights and end requests), processed
    log-probabilities and the worker class; it must be Renma's alone, and see the files that Renma writes. What can be
    seen of that is checked at the start; docs/engines.md has the command.
    """

    def __init__(self, settings: Settings, *, address: str | None = None, child: ServerChild | None = None) -> None:
        assert (address is None) != (child is None)
        self._settings = settings
        self._address = address
        self._child = child
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._model = ""

    async def start(self, folder: Path) -> None:
        if self._child is not None:
            await self._child.start(folder)
        models = (await self._get("/v1/models")).get("data")
        served = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        self._model = str(served.get("id", ""))
        length = served.get("max_model_len")
        if not isinstance(length, int) or length < self._settings.context:
            raise ModelError(
                f"the vllm server takes {length} tokens of context and the policy {self._settings.context}: start it "
                f"with --max-model-len {self._settings.context}, or set rollout.engine.context"
            )
        if self._child is None:
            await self.load(folder)  # it was started with weights of its own

    async def generate(self, name: str, prompt: Sequence[int], params: SamplingParams) -> Part:
        allowed = self._settings.output_ids
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "add_special_tokens": False,
            "temperature": params.temperature,
            "seed": params.seed,
            "max_tokens": params.max_tokens,
            "stop": list(params.stop_strings),
            "stop_token_ids": list(params.stop_ids),
            "ignore_eos": True,  # what ends an action is the renderer's to say
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
        }
        if allowed is not None:
            body["allowed_token_ids"] = list(allowed)
        answer = await self._post("/v1/completions", body, headers={"X-Request-Id": name}, seconds=None)
        return part_of(answer)

    async def abort(self, names: Sequence[str]) -> None:
        # The server's own names: the kind of request before, the number of the prompt behind.
        await self._post("/abort_requests", {"request_ids": [f"cmpl-{name}-0" for name in names]})

    async def load(self, folder: Path) -> None:
        await self._post("/collective_rpc", {"method": "renma_load_weights", "args": [str(folder)]})
        await reset_until_done(self._reset)

    async def _reset(self) -> bool:
        return (await self._post("/reset_prefix_cache", {})).get("success") is True

    async def close(self) -> None:
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._client = None
        if self._child is not None:
            await self._child.stop()

    # ---- HTTP

    def _http(self) -> httpx.AsyncClient:
        """The client of the loop that runs now: connections belong to the loop they were opened in."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop = loop
            unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=self._settings.slots)
            if self._child is not None:
                transport = httpx.AsyncHTTPTransport(uds=self._child.socket, limits=unlimited)
                self._client = httpx.AsyncClient(transport=transport, base_url="http://vllm")
            else:
                assert self._address is not None
                self._client = httpx.AsyncClient(base_url=self._address, limits=unlimited)
        return self._client

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._ask("GET", path, None, None, CONTROL_SECONDS)

    async def _post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        headers: dict[str, str] | None = None,
        seconds: float | None = CONTROL_SECONDS,
    ) -> dict[str, Any]:
        return await self._ask("POST", path, body, headers, seconds)

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None, headers: dict[str, str] | None, seconds: float | None
    ) -> dict[str, Any]:
        try:
            answer = await self._http().request(method, path, json=body, headers=headers, timeout=seconds)
        except httpx.HTTPError as error:
            log = "" if self._child is None else f"; its log: {self._child.log}"
            raise RunError(
                f"the vllm server does not answer {method} {path} ({one_line(error)}): is it running?{log}"
            ) from error
        if not answer.is_success:
            raise self._refused(method, path, answer)
        if not answer.content:
            return {}
        try:
            value = answer.json()
        except json.JSONDecodeError as error:
            raise RunError(f"the vllm server answered {method} {path} with no JSON: is it a vllm server?") from error
        if not isinstance(value, dict):
            raise RunError(f"the vllm server answered {method} {path} with no JSON object: is it a vllm server?")
        return value

    def _refused(self, method: str, path: str, answer: httpx.Response) -> ModelError | RunError:
        if answer.status_code == 404 and not path.startswith("/v1/"):
            return ModelError(
                f"the vllm server has no {path}: start it with VLLM_SERVER_DEV_MODE=1 in its environment "
                "(docs/engines.md has the command)"
            )
        said = " ".join(answer.text.split())[:300]
        kind = ModelError if 400 <= answer.status_code < 500 else RunError
        hint = "; was it started with --worker-extension-cls (docs/engines.md)?" if path == "/collective_rpc" else ""
        return kind(f"the vllm server answered {method} {path} with {answer.status_code}: {said}{hint}")


def part_of(answer: dict[str, Any]) -> Part:
    """The one completion in an answer. Raises RunError when ids or log-probabilities are not in it."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    if not isinstance(choice, dict):
        raise RunError("the vllm server's answer holds no completion: is it a vllm server of version 0.32 or later?")
    ids, scores = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    reason = {"stop": "stop", "length": "length", "abort": "aborted"}.get(str(choice.get("finish_reason")))
    if reason is None:
        raise RunError(f"the vllm server ended a request with {choice.get('finish_reason')!r}: see its log")
    if reason == "aborted" and not ids:
        return Part([], [], "aborted")
    if not _all_of(ids, int) or not _all_of(scores, int | float):
        raise RunError("the vllm server gave no token ids or log-probabilities: is it of version 0.32 or later?")
    return Part([int(i) for i in ids], [float(s) for s in scores], reason)  # type: ignore[arg-type,union-attr]


def _all_of(values: Any, kind: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in values)
