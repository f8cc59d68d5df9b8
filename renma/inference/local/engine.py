"""The local engine: continuous batching in the event loop, over the learner's own weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from renma.errors import ModelError, RunError
from renma.inference.base import Sample, SamplingParams
from renma.inference.checks import check_params, checked_context, checked_prompt
from renma.inference.local.policy import SlotPolicy, causal_lm
from renma.inference.local.prefix import admit, plan, ragged_batches
from renma.inference.local.sampler import draw
from renma.inference.local.sequences import Sequences
from renma.inference.local.slots import Request, Slots
from renma.inference.stopping import Stoppers
from renma.profiling import span, timed
from renma.types import Ids, SampleStop

CHUNK = 1024  # positions of one prompt that one forward computes, which bounds the memory of its mask


class LocalEngine:
    """Samples with a transformers causal LM that lives in this process, and that the learner may be training.

    model: full or sliding-window attention, `sdpa` or `eager`; a peft LoRA model too. Never copied: weights are read in
    place, so after they change call `load_weights`, and let no thread train while a request runs.
    output_ids: [V'] the only tokens the policy can emit, over which log-probabilities are normalised; None: all.
    slots: requests decoded at once. context: the most tokens of prompt and action; None: the model's own.
    deterministic: wait until every open episode (`episode_opened`) has a request here before each round, and admit in
    the order of keys; batches, and with them the last bits of the logits, then do not depend on timing. Without open
    episodes it runs whatever waits. Whoever runs episodes must open the next before closing the last, in one go, and
    must not open one that cannot send its requests yet: the engine would wait for it.
    record_routing: give with each sample the experts that a mixture-of-experts model chose, for the learner to replay;
    a dense model has none, at no cost. What is sampled does not depend on it.
    weights: "own" the learner's; "int8" 8-bit copies of its linear layers, made anew by `load_weights`: another policy,
    whose log-probabilities are recorded (int8.py).

    Requests run in rounds inside the event loop: one forward for new prompts, one for all running requests together,
    in which requests that have the same tokens so far are computed as one (sequences.py). When weights change under a
    running request, it goes on: its keys and values are computed anew, with the experts that the new weights choose,
    and later tokens carry the new version.

    `stats` counts, since the start: prompt_positions (of admitted prompts), of which reused_positions were cached or
    shared and computed_positions went through the model; recomputed_positions (running requests, after new weights);
    sampled_tokens; rounds of decoding; busy_slot_rounds (sum over rounds of busy slots); decoded_positions (sum over
    rounds of distinct sequences, each computed once); prefills (forwards).
    """

    has_logprobs = True

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        output_ids: Tensor | None = None,
        slots: int = 64,
        context: int | None = None,
        deterministic: bool = True,
        record_routing: bool = False,
        weights: Literal["own", "int8"] = "own",
    ) -> None:
        config = causal_lm(model).config.get_text_config()
        self.context = checked_context(config, context)
        if weights not in ("own", "int8"):
            raise ModelError(f"the local engine's weights are own or int8, not {weights!r}")
        if slots < 1:
            raise ModelError(f"an engine needs at least one slot, not {slots}")
        self.version = 0
        self.deterministic = deterministic
        self.stats: dict[str, int | float] = dict.fromkeys(
            (
                "prompt_positions",
                "reused_positions",
                "computed_positions",
                "recomputed_positions",
                "sampled_tokens",
                "rounds",
                "busy_slot_rounds",
                "decoded_positions",
                "prefills",
            ),
            0,
        )
        self._vocabulary: int = config.vocab_size
        self._policy = SlotPolicy(model, slots, self.context, output_ids, record_routing, weights == "int8")
        self._slots = Slots(slots, self.context)
        self._sequences = Sequences(slots, self.context, self._policy.cache)
        self._output_ids = None if output_ids is None else output_ids.cpu().numpy().astype(np.int64)
        self._stoppers = Stoppers(tokenizer)
        self._waiting: list[Request] = []
        self._arrivals = 0
        self._episodes = 0
        self._driver: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._closed = False

    async def sample(
        self, prompt_ids: Sequence[int] | Ids, params: SamplingParams, *, key: tuple[Any, ...] = ()
    ) -> Sample:
        """Sample one action; see the contract. Cancel the awaiting task to withdraw the request.

        Raises ContextOverflow for a prompt of `context` tokens or more, ModelError for ids outside the vocabulary or
        parameters outside their range, RunError after `close`, and whatever the model raises.
        """
        if self._closed:
            raise RunError("the local engine was closed: make a new one to sample")
        with span("engine"):
            request = self._request(prompt_ids, params, key)
        self._enter_loop()
        self._waiting.append(request)
        if self._driver is None:
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        self._wake.set()
        try:
            return await request.future
        except asyncio.CancelledError:
            self._withdraw(request)
            raise

    async def load_weights(self, version: int) -> None:
        """The weights in the module are now those of `version`: every cached prefix is forgotten."""
        self.version = version
        self._policy.weights_changed()
        sequences = self._sequences
        self.stats["recomputed_positions"] += int(sequences.cached[sequences.runs].sum())
        sequences.forget()

    def episode_opened(self) -> None:
        self._episodes += 1

    def episode_closed(self) -> None:
        self._episodes -= 1
        self._wake.set()

    async def close(self) -> None:
        """End what runs, with what was sampled and stop_reason "aborted", and give the buffers back."""
        self._closed = True
        empty = np.zeros(0, np.int32)
        for request in self._waiting:
            request.settle(Sample(empty, np.zeros(0, np.float32), empty, "aborted"))
        self._waiting.clear()
        for request in self._slots.running:
            self._finish(request, "aborted")
        self._wake.set()
        self._sequences.forget()
        self._policy.cache.release()

    def _enter_loop(self) -> None:
        """Forget a driver that has ended, and all that a loop which was abandoned has left behind.

        Nothing of a loop is kept for good: the engine may serve several asyncio.run calls, one after the other.
        """
        if self._driver is None:
            return
        abandoned = self._driver.get_loop() is not asyncio.get_running_loop()
        if abandoned and not self._driver.done():
            # Their futures belong to a loop that no longer runs: nobody waits for them.
            self._waiting.clear()
            for request in self._slots.running:
                self._leave(request)
        if abandoned or self._driver.done():
            self._wake = asyncio.Event()
            self._driver = None

    # ---- requests

    def _request(self, prompt_ids: Sequence[int] | Ids, params: SamplingParams, key: tuple[Any, ...]) -> Request:
        prompt = checked_prompt(prompt_ids, context=self.context, vocabulary=self._vocabulary)
        check_params(params)
        self._arrivals += 1
        order: tuple[object, ...] = (self._arrivals,)
        if self.deterministic:
            # Numbers before text, so that any two keys can be compared; arrival decides between equal keys only.
            parts = tuple((0, part, "") if isinstance(part, int | float) else (1, 0, str(part)) for part in key)
            order = (parts, self._arrivals)
        return Request(
            prompt.astype(np.int32),
            params,
            order,
            min(params.max_tokens, self.context - len(prompt)),
            frozenset(params.stop_ids),
            self._stoppers.of(params.stop_strings),
            asyncio.get_running_loop().create_future(),
        )

    def _withdraw(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        elif request.slot >= 0:
            self._leave(request)
        self._wake.set()

    def _leave(self, request: Request) -> None:
        """`request` runs no longer, and nobody is to be answered."""
        self._slots.vacate(request)
        self._sequences.leave(request)

    def _finish(self, request: Request, reason: SampleStop) -> None:
        """Answer `request` with what was sampled."""
        sampled = int(self._slots.count[request.slot])
        self._slots.finish(request, reason, self._sequences.routing(request, sampled))
        self._sequences.leave(request)

    # ---- the driver

    async def _drive(self) -> None:
        """Run rounds until nothing is asked for. Between two rounds, every task that can run does."""
        try:
            while self._waiting or self._slots.busy:
                if self.deterministic and len(self._waiting) + self._slots.busy < self._episodes:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                with self._policy.sampling():
                    self._round()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._drop(None)
            raise
        except Exception as error:
            self._drop(error)

    def _drop(self, error: Exception | None) -> None:
        """Every request ends with `error` (None: cancelled). Buffers may hold NaN by now: they are thrown away."""
        pending = [*self._waiting, *self._slots.running]
        self._waiting.clear()
        for request in pending:
            if request.slot >= 0:
                self._leave(request)
            if not request.future.done():
                request.future.cancel() if error is None else request.future.set_exception(error)
        self._sequences.forget()
        self._policy.cache.release()

    @timed("engine")
    def _round(self) -> None:
        """Admit, compute what is uncached, then one token for every running request."""
        sequences = self._sequences
        free = self._slots.size - self._slots.busy
        if free and self._waiting:
            self._waiting.sort(key=lambda request: request.order)
            self._admit(self._waiting[:free])
            del self._waiting[:free]
        running = sequences.compact()
        lacking = np.flatnonzero(sequences.total[:running] - sequences.cached[:running] > 1)
        if len(lacking):
            self._prefill(lacking.tolist())
            running = sequences.compact()
        if running:
            rows = np.arange(running)
            at = sequences.total[:running] - 1
            logits = self._policy.decode(sequences.tokens[rows, at], at, sequences.shared(running))
            sequences.cached[:running] += 1
            self.stats["rounds"] += 1
            self.stats["busy_slot_rounds"] += self._slots.busy
            self.stats["decoded_positions"] += running
            self._extend(rows, logits)

    def _admit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._slots.place(request)
        prompts = sum(len(request.prompt) for request in requests)
        reused = admit(self._sequences, requests)
        self.stats["prompt_positions"] += prompts
        self.stats["reused_positions"] += reused
        self.stats["computed_positions"] += prompts - reused

    def _prefill(self, rows: list[int]) -> None:
        """Compute all that `rows` lack, and sample the next token of each of their requests."""
        wave = plan(self._sequences, rows)
        features: dict[int, Tensor] = {}
        self._compute(wave.first, features)
        for row, (leader, length) in wave.borrow.items():
            self._borrow(leader, row, length)
        self._compute(wave.second, features)
        self._extend(np.asarray(rows), self._policy.logits(torch.stack([features[row] for row in rows])))

    def _borrow(self, leader: int, row: int, length: int) -> None:
        sequences = self._sequences
        had = int(sequences.cached[row])
        self._policy.cache.copy(leader, row, had, length)
        sequences.cached[row] = length
        # What it was counted as having to compute, it does not.
        if sequences.fresh[row]:
            self.stats["reused_positions"] += length - had
            self.stats["computed_positions"] -= length - had

    def _compute(self, rows: Sequence[int], features: dict[int, Tensor]) -> None:
        """Run `rows` to their ends, a chunk at a time, in padded batches."""
        sequences = self._sequences
        pending = list(rows)
        while pending:
            starts = [int(sequences.cached[row]) for row in pending]
            ends = [min(int(sequences.total[row]), start + CHUNK) for row, start in zip(pending, starts, strict=True)]
            for batch in ragged_batches([end - start for start, end in zip(starts, ends, strict=True)]):
                batch = sorted(batch, key=lambda i: pending[i])
                members = [pending[i] for i in batch]
                last = self._policy.prefill(
                    members, [starts[i] for i in batch], [ends[i] for i in batch], sequences.tokens
                )
                self.stats["prefills"] += 1
                for i, row, feature in zip(batch, members, last, strict=True):
                    sequences.cached[row] = ends[i]
                    features[row] = feature
            pending = [row for row in pending if sequences.cached[row] < sequences.total[row]]

    def _extend(self, rows: NDArray[np.int64], logits: Tensor) -> None:
        """Draw a token for each request of `rows` from its row of `logits` [n, V'], and end the requests it ends.

        A row goes on with the token of the first of its requests that does; those that drew others branch off.
        """
        slots, sequences = self._slots, self._sequences
        sharers = [list(sequences.sharers[row]) for row in rows.tolist()]
        requests = [request for row in sharers for request in row]
        at = np.array([request.slot for request in requests], np.int64)
        of = np.repeat(np.arange(len(rows)), [len(row) for row in sharers])
        how = slots.drawing(at, of)
        if how is None:
            logits = logits.index_select(0, torch.from_numpy(of).to(logits.device))
            how = slots.drawing(at, np.arange(len(of)))
            assert how is not None
        chosen, logprobs = draw(logits, how)
        tokens = chosen if self._output_ids is None else self._output_ids[chosen]
        slots.append(at, tokens, logprobs, self.version)
        self.stats["sampled_tokens"] += len(requests)
        drawn = iter(tokens.tolist())
        last = np.zeros(len(rows), np.int64)
        branches: list[tuple[int, list[Request], int]] = []
        ended: list[tuple[Request, SampleStop]] = []
        for place, (row, sharing) in enumerate(zip(rows.tolist(), sharers, strict=True)):
            going_on: dict[int, list[Request]] = {}
            for request in sharing:
                token = next(drawn)
                reason = self._stop_reason(request, token)
                if reason is None:
                    going_on.setdefault(token, []).append(request)
                else:
                    ended.append((request, reason))
            if going_on:  # else the row is done with, and its last token never needed
                last[place], *others = going_on
                branches.extend((row, going_on[token], token) for token in others)
        for request, reason in ended:
            self._finish(request, reason)
        sequences.extend(rows, last)
        for row, movers, token in branches:
            sequences.branch(row, movers, token)

    def _stop_reason(self, request: Request, token: int) -> SampleStop | None:
        count = int(self._slots.count[request.slot])
        if token in request.stop_ids:
            return "stop"
        stopper = request.stop_strings
        if stopper is not None and stopper.may_end(token):
            first = max(0, count - stopper.tail)
            if stopper.completed(self._slots.ids[request.slot, first:count].tolist()):
                return "stop"
        return "length" if count >= request.most else None
