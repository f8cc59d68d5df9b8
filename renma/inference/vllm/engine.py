"""The vllm engine: Renma's contract over a vLLM that runs in this process or behind HTTP."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from renma.errors import ModelError, RunError
from renma.inference.base import Sample, SamplingParams
from renma.inference.checks import check_params, checked_prompt
from renma.inference.stopping import Stoppers, StopStrings
from renma.inference.vllm.backend import Backend, Part
from renma.inference.vllm.weights import PolicyFiles
from renma.seeding import seed_for
from renma.types import Ids, SampleStop

COOLEST, HOTTEST = 0.01, 2.0  # the temperatures that vLLM takes as they are
ABORT_AGAIN = 0.5  # seconds: a request may have been on its way when all were told to end
ABORT_SECONDS = 120.0


@dataclass(slots=True)
class Action:
    """What one request has sampled so far, over every call that was made for it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def sample(self, reason: SampleStop) -> Sample:
        return Sample(
            np.asarray(self.ids, np.int32),
            np.asarray(self.logprobs, np.float32),
            np.asarray(self.versions, np.int32),
            reason,
        )


class VllmEngine:
    """Samples with a backend's vLLM, which gets a copy of the policy's weights when it starts and at `load_weights`.

    context: the most tokens of prompt and action. vocabulary: rows of the model's output embedding.

    vLLM starts with the first request or `load_weights`, with the weights that `files` then holds. Requests end by
    Renma's own rule (`_cut`), the local engine's: vLLM's stop strings only save it work. When weights change, running
    requests are ended with what they have and sent again, prompt and sampled tokens together; a draw is never made
    twice with the same random numbers, and every token carries the version that its call was sent under.

    Log-probabilities are vLLM's `processed_logprobs`: after temperature and allowed ids. After top_p, top_k or min_p
    they would be those of the cut set, so a request with one of these is refused, unless it is greedy, where none of
    them does anything. `deterministic` is False: see the package's docstring. `key` and open episodes change nothing.

    `stats` counts requests, the calls made for them (more where weights changed), and sampled_tokens.
    """

    has_logprobs = True
    deterministic = False

    def __init__(
        self,
        backend: Backend,
        files: PolicyFiles,
        tokenizer: PreTrainedTokenizerBase,
        *,
        context: int,
        vocabulary: int,
    ) -> None:
        self.context = context
        self.version = 0
        self.stats: dict[str, int] = {"requests": 0, "calls": 0, "sampled_tokens": 0}
        self._backend = backend
        self._files = files
        self._vocabulary = vocabulary
        self._stoppers = Stoppers(tokenizer)
        self._numbers = 0
        self._running: set[str] = set()
        self._started = False
        self._closed = False
        self._broken: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Each belongs to the loop that first waits for it.
        self._changing = asyncio.Lock()
        self._open = asyncio.Event()
        self._idle = asyncio.Event()

    async def sample(
        self, prompt_ids: Sequence[int] | Ids, params: SamplingParams, *, key: tuple[Any, ...] = ()
    ) -> Sample:
        """Sample one action; see the contract. Cancel the awaiting task to withdraw the request.

        Raises ContextOverflow for a prompt of `context` tokens or more; ModelError for ids outside the vocabulary, for
        parameters outside their range, and for those whose log-probabilities vLLM cannot give; RunError after `close`
        and when vLLM has failed.
        """
        prompt = checked_prompt(prompt_ids, context=self.context, vocabulary=self._vocabulary).tolist()
        check_params(params)
        check_exact(params)
        self._enter_loop()
        self._check_alive()
        await self._ready()
        limit = min(params.max_tokens, self.context - len(prompt))
        stopper = self._stoppers.of(params.stop_strings)
        action = Action()
        self.stats["requests"] += 1
        while True:
            while not self._open.is_set():
                await self._open.wait()
            if self._closed:
                return action.sample("aborted")
            self._check_alive()
            version = self.version
            done = len(action.ids)
            asked = replace(
                params,
                max_tokens=limit - done,
                # The same seed again would draw the same random numbers again.
                seed=params.seed if not done else seed_for(params.seed, "continued", done),
            )
            part = await self._call([*prompt, *action.ids], asked)
            self._check_part(part, limit - done)
            action.ids += part.ids
            action.logprobs += part.logprobs
            action.versions += [version] * len(part.ids)
            self.stats["sampled_tokens"] += len(part.ids)
            end = self._cut(action.ids, done, params.stop_ids, stopper)
            if end is not None:
                del action.ids[end:], action.logprobs[end:], action.versions[end:]
                return action.sample("stop")
            if len(action.ids) >= limit:
                return action.sample("length")
            if part.reason == "aborted" and (self._closed or self._open.is_set()):
                return action.sample("aborted")  # not by us, to change weights
            # Else weights change, or vLLM saw a stop string where there is none: go on from here.

    async def load_weights(self, version: int) -> None:
        """The module holds the weights of `version`: copy them into vLLM, in place, and forget every cached prefix.

        Raises RunError when that fails; the engine then samples no more.
        """
        self._enter_loop()
        self._check_alive()
        if await self._ready():
            self.version = version  # it has just started with these weights
            return
        async with self._changing:
            self._open.clear()
            try:
                await self._drain()
                with self._files.written(whole=False) as folder:
                    await self._backend.load(folder)
                self.version = version
            except BaseException as error:
                # Some of the weights may be new and some old.
                self._broken = RunError(f"vllm did not take the weights of version {version}: {error}")
                raise
            finally:
                self._open.set()

    def episode_opened(self) -> None:
        """Nothing: vLLM decodes whatever has arrived."""

    def episode_closed(self) -> None:
        """Nothing."""

    async def close(self) -> None:
        """End what runs, with what was sampled and stop_reason "aborted", and stop vLLM where it is Renma's own."""
        if self._closed:
            return
        self._closed = True
        self._enter_loop()
        async with self._changing:
            try:
                if self._running and self._broken is None:
                    await self._drain()
            finally:
                self._open.set()
                await self._backend.close()

    # ---- life

    def _enter_loop(self) -> None:
        """Forget what a loop that was abandoned has left: the engine may serve several asyncio.run calls in turn."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._loop = loop
        self._running.clear()
        self._changing, self._open, self._idle = asyncio.Lock(), asyncio.Event(), asyncio.Event()
        self._open.set()

    def _check_alive(self) -> None:
        if self._closed:
            raise RunError("the vllm engine was closed: make a new one to sample")
        if self._broken is not None:
            raise RunError(str(self._broken)) from self._broken

    async def _ready(self) -> bool:
        """Start vLLM if it has not been; whether it was this call that did."""
        if self._started:
            return False
        async with self._changing:
            if self._started:
                return False
            self._check_alive()
            try:
                with self._files.written(whole=True) as folder:
                    await self._backend.start(folder)
            except Exception as error:
                self._broken = error
                raise
            self._started = True
            return True

    async def _drain(self) -> None:
        """End every running call; each returns what it has."""
        loop = asyncio.get_running_loop()
        patience = loop.time() + ABORT_SECONDS
        while self._running:
            self._idle.clear()
            await self._backend.abort(sorted(self._running))
            try:
                await asyncio.wait_for(self._idle.wait(), ABORT_AGAIN)
            except TimeoutError:
                if loop.time() > patience:
                    raise RunError(
                        f"vllm still runs {len(self._running)} requests {ABORT_SECONDS:.0f} s after they were aborted: "
                        "is it alive? see its log"
                    ) from None

    # ---- requests

    async def _call(self, prompt: list[int], params: SamplingParams) -> Part:
        self._numbers += 1
        name = f"renma-{id(self):x}-{self._numbers}"
        self.stats["calls"] += 1
        self._running.add(name)
        try:
            return await self._backend.generate(name, prompt, params)
        finally:
            self._running.discard(name)
            if not self._running:
                self._idle.set()

    def _check_part(self, part: Part, most: int) -> None:
        """Raise RunError for an answer that does not fit the question: a server may be another than it seems."""
        wrong = ""
        if len(part.ids) != len(part.logprobs):
            wrong = f"{len(part.ids)} ids with {len(part.logprobs)} log-probabilities"
        elif len(part.ids) > most or (part.reason == "length" and len(part.ids) < most):
            wrong = f"{len(part.ids)} tokens where {most} were the most"
        elif not part.ids and part.reason != "aborted":
            wrong = "no token"
        elif part.ids and not 0 <= min(part.ids) <= max(part.ids) < self._vocabulary:
            wrong = f"ids {min(part.ids)}..{max(part.ids)} outside the model's 0..{self._vocabulary - 1}"
        elif not all(map(math.isfinite, part.logprobs)):
            wrong = "a log-probability that is not finite"
        if wrong:
            raise RunError(f"vllm answered with {wrong}: does it hold this policy, and with this context?")

    @staticmethod
    def _cut(ids: Sequence[int], first: int, stop_ids: tuple[int, ...], stopper: StopStrings | None) -> int | None:
        """The length at which the action is complete, looking at tokens from `first` on; None: not yet."""
        for at in range(first, len(ids)):
            if ids[at] in stop_ids:
                return at + 1
            if stopper is None or not stopper.may_end(ids[at]):
                continue
            if stopper.completed(ids[max(0, at + 1 - stopper.tail) : at + 1]):
                return at + 1
        return None


def check_exact(params: SamplingParams) -> None:
    """Raise ModelError where vLLM would not give the contract's log-probabilities, or not sample as asked."""
    if params.temperature == 0:
        return  # greedy: nothing is cut, and vLLM's log-probabilities are those at temperature 1
    if not COOLEST <= params.temperature <= HOTTEST:
        raise ModelError(
            f"temperature {params.temperature:g}: vllm samples at 0 or from {COOLEST:g} to {HOTTEST:g}; choose one of "
            "these, or use rollout.engine: {type: local}"
        )
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(params, name) != off:
            raise ModelError(
                f"{name}={getattr(params, name):g}: vllm's log-probabilities would be those of the cut set and not the "
                f"policy's; leave {name} at {off:g}, or use rollout.engine: {{type: local}}"
            )
