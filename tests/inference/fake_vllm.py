"""A stand-in for a vLLM server, of the standard library alone, so that it can also run as a program.

It "samples" ids that count up from the prompt's last, ten higher for every load of weights, with log-probability
-(1 + loads) for each; requests with `HOLD` as their seed stop after three tokens and wait to be aborted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

HOLD = 77
CONTEXT = 96


class FakeVllm:
    """Answers like vLLM's server what Renma asks of it, and remembers what it was asked."""

    def __init__(self, *, context: int = CONTEXT, development: bool = True, stubborn: int = 0) -> None:
        self.context, self.development = context, development
        self.stubborn = stubborn  # how often resetting the prefix cache fails first
        self.asked: list[tuple[str, Any]] = []
        self.loads = 0
        self.resets = 0
        self.held: dict[str, asyncio.Event] = {}
        self.ended_early: list[str] = []
        self.arrived = asyncio.Event()
        self.broken: tuple[int, str] | None = None
        self.answer: Any = None  # instead of a completion
        self._server: asyncio.Server | None = None

    async def listen(self, *, socket: str | None = None) -> str:
        """Its address, once it listens."""
        if socket is not None:
            self._server = await asyncio.start_unix_server(self._serve, socket)
            return socket
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readline():
                method, path, _ = head.decode().split()
                length, name = 0, ""
                while line := (await reader.readline()).decode().strip():
                    field, _, value = line.partition(": ")
                    length = int(value) if field.lower() == "content-length" else length
                    name = value if field.lower() == "x-request-id" else name
                body = json.loads(await reader.readexactly(length)) if length else None
                self.asked.append((path, body))
                status, answer = await self._answer(method, path, body, name, reader)
                content = json.dumps(answer).encode() if not isinstance(answer, bytes) else answer
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
        except ConnectionError:
            pass  # the client has gone
        finally:
            writer.close()

    async def _answer(self, method: str, path: str, body: Any, name: str, reader: asyncio.StreamReader) -> Any:
        known = ["/health", "/v1/models", "/v1/completions"]
        known += ["/abort_requests", "/collective_rpc", "/reset_prefix_cache"] if self.development else []
        if self.broken is not None and path not in ("/health", "/v1/models"):
            return self.broken[0], {"error": self.broken[1]}
        if path not in known:
            return 404, {"detail": "Not Found"}
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy", "max_model_len": self.context}]}
        if path == "/v1/completions":
            return 200, self.answer if self.answer is not None else await self._complete(body, name, reader)
        if path == "/abort_requests":
            for asked in body["request_ids"]:
                if asked in self.held:
                    self.held[asked].set()
        if path == "/collective_rpc":
            assert body["method"] == "renma_load_weights"
            assert list(Path(body["args"][0]).glob("*.safetensors"))
            self.loads += 1
        if path == "/reset_prefix_cache":
            self.resets += 1
            return 200, {"success": self.resets > self.stubborn}
        return 200, {}

    async def _complete(self, body: Any, name: str, reader: asyncio.StreamReader) -> Any:
        ids = [body["prompt"][-1] + 1 + t + 10 * self.loads for t in range(body["max_tokens"])]
        reason = "length"
        at = next((i for i, token in enumerate(ids) if token in body["stop_token_ids"]), None)
        if at is not None:
            ids, reason = ids[: at + 1], "stop"
        score = -1.0 - self.loads
        if body["seed"] == HOLD:
            name = f"cmpl-{name}-0"
            self.held[name] = asyncio.Event()
            self.arrived.set()
            gone = asyncio.ensure_future(reader.read(1))
            held = asyncio.ensure_future(self.held[name].wait())
            done, _ = await asyncio.wait((gone, held), return_when=asyncio.FIRST_COMPLETED)
            if held not in done:
                self.ended_early.append(name)
                self.arrived.set()
                raise ConnectionError
            gone.cancel()
            await asyncio.wait((gone,))
            ids, reason = ids[:3], "abort"
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [score] * len(ids)}, "finish_reason": reason}
        return {"choices": [choice]}


async def main(arguments: list[str]) -> None:
    """As vLLM's server: writes what it was given into its log, then serves for ever."""
    options = dict(itertools.pairwise(arguments))
    print("model has", sorted(file.name for file in Path(options["--model"]).iterdir()), flush=True)
    if options.get("--fail") == "yes":
        raise SystemExit("ValueError: this model is too large")
    await FakeVllm(context=int(options["--max-model-len"])).listen(socket=options["--uds"])
    print("arguments", json.dumps(arguments), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
