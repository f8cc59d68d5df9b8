"""Cross-policy sampling: the current policy and a stale snapshot of it answer as if they were one engine.

Some of the samples then come from a policy that has not yet followed the last updates, which keeps exploration wide
(AgentRL, arXiv 2510.04206). Each token keeps the log-probability and the version of the policy that sampled it, so the
learner's ratios and corrections see whose it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from renma.errors import RecipeError, RunError
from renma.inference.base import Engine, Sample, SamplingParams
from renma.seeding import seed_for
from renma.types import Ids

Mode = Literal["step", "mixed"]


@dataclass(slots=True, eq=False)
class Request:
    """One call of `sample` that waits for its round. `running` is set while it is with its engine."""

    engine: Engine
    prompt: Sequence[int] | Ids
    params: SamplingParams
    key: tuple[Any, ...]
    answer: asyncio.Future[Sample]
    running: asyncio.Task[Sample] | None = None


class PolicyPool:
    """An engine over two: `current` samples with `model`, which the learner trains; `stale` with `snapshot`, a copy.

    mode: `step`, a policy is drawn for every action, by the request's seed; `mixed`, for a whole trajectory, by the key
    without its last part (the turn) and `seed`. stale_share: the share of draws that go to the snapshot.
    refresh_every: once the current weights are so many versions ahead of the snapshot's, `load_weights` copies them
    into it. A snapshot of the very version that is loaded is copied again: weights may be replaced without a new
    version (a cold start).
    deterministic: None: as `current` is. Requests are answered in rounds: a round begins when every open episode has a
    request here, and its answers are given when all of it is sampled. What an engine samples together, and what it has
    cached, then does not depend on timing. Neither engine could wait for all open episodes by itself, since some of
    their requests are with the other: to an engine, an episode is open exactly while one of its requests is there.
    Without open episodes, or not deterministic, requests go straight to their engines.

    `latest` is an engine of the current policy alone, in the pool's rounds: for evaluation and greedy baselines, which
    may run beside the sampling.

    Raises RecipeError for a share outside (0, 1) or a refresh of less than 1, RunError when the two models differ.
    """

    def __init__(
        self,
        current: Engine,
        stale: Engine,
        model: nn.Module,
        snapshot: nn.Module,
        *,
        mode: Mode = "step",
        stale_share: float = 0.25,
        refresh_every: int = 25,
        deterministic: bool | None = None,
        seed: int = 0,
    ) -> None:
        if mode not in ("step", "mixed"):
            raise RecipeError(f"rollout.cross_policy.mode {mode!r}: it must be step or mixed")
        if not 0 < stale_share < 1:
            raise RecipeError(f"rollout.cross_policy.stale_share {stale_share}: it must be above 0 and below 1")
        if refresh_every < 1:
            raise RecipeError(f"rollout.cross_policy.refresh_every {refresh_every}: it must be 1 or more")
        self.current = current
        self.stale = stale
        self.mode = mode
        self.stale_share = stale_share
        self.refresh_every = refresh_every
        self.deterministic = bool(getattr(current, "deterministic", True)) if deterministic is None else deterministic
        self.context = min(current.context, stale.context)
        self.version = current.version
        self.snapshot_version = current.version
        self.has_logprobs = current.has_logprobs and stale.has_logprobs
        self._seed = seed
        self._model, self._snapshot = model, snapshot
        copy_weights(model, snapshot)
        self.latest = Latest(self)
        self._episodes = 0
        self._held: list[Request] = []
        self._with_engines: set[Request] = set()
        self._round: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def drawn(self, params: SamplingParams, key: tuple[Any, ...]) -> Engine:
        """The engine that answers such a request: a function of its seed, or of its key, and of nothing else."""
        if self.mode == "mixed" and len(key) > 1:
            parts = (part if isinstance(part, int) else str(part) for part in key[:-1])
            number = seed_for(self._seed, "policy of a trajectory", *parts)
        else:
            number = seed_for(params.seed, "policy of an action")
        return self.stale if number / 2**63 < self.stale_share else self.current

    async def sample(
        self, prompt_ids: Sequence[int] | Ids, params: SamplingParams, *, key: tuple[Any, ...] = ()
    ) -> Sample:
        """Sample one action with a policy of the pool; see the contract."""
        return await self.sample_with(self.drawn(params, key), prompt_ids, params, key)

    async def sample_with(
        self, engine: Engine, prompt_ids: Sequence[int] | Ids, params: SamplingParams, key: tuple[Any, ...]
    ) -> Sample:
        """Sample one action with an engine of the pool, in its rounds."""
        if not (self.deterministic and self._episodes):
            return await engine.sample(prompt_ids, params, key=key)
        self._enter_loop()
        request = Request(engine, prompt_ids, params, key, asyncio.get_running_loop().create_future())
        self._held.append(request)
        self._begin_round()
        try:
            return await request.answer
        except asyncio.CancelledError:
            if request in self._held:
                self._held.remove(request)
            elif request.running is not None:
                request.running.cancel()
            raise

    async def load_weights(self, version: int) -> None:
        """The model's weights are now those of `version`; the snapshot gets them too when it is due.

        Both engines forget their prefixes, the snapshot's also when it stays: a resumed run has none either.
        """
        self.version = self.latest.version = version
        if version - self.snapshot_version >= self.refresh_every or version <= self.snapshot_version:
            copy_weights(self._model, self._snapshot)
            self.snapshot_version = version
        await self.stale.load_weights(self.snapshot_version)
        await self.current.load_weights(version)

    def episode_opened(self) -> None:
        self._episodes += 1

    def episode_closed(self) -> None:
        self._episodes -= 1
        self._begin_round()

    async def close(self) -> None:
        await self.current.close()
        await self.stale.close()

    def state_dict(self) -> dict[str, Any]:
        """The snapshot's weights, each tensor once, and their version."""
        return {
            "version": self.snapshot_version,
            "snapshot": {name: tensor.detach() for name, tensor in weights_of(self._snapshot).items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the snapshot back. `load_weights` must follow before anything is sampled.

        Raises RunError for a snapshot of another model.
        """
        put_weights(state["snapshot"], self._snapshot)
        self.snapshot_version = int(state["version"])

    # ---- rounds

    def _enter_loop(self) -> None:
        """Forget what a loop that was abandoned has left: the pool may serve several asyncio.run calls in turn."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop, self._round = loop, None
        self._held.clear()
        for request in list(self._with_engines):
            self._returned(request)

    def _begin_round(self) -> None:
        """Hand over all that is held, once every open episode has asked and nothing is being sampled."""
        loop = self._loop
        if loop is None or not loop.is_running():  # what is held belongs to a loop that has ended
            return
        if self._round is None and self._held and len(self._held) >= self._episodes:
            requests, self._held = self._held, []
            self._round = loop.create_task(self._sample_round(requests))

    async def _sample_round(self, requests: list[Request]) -> None:
        # All are opened before any is sent: each engine then begins with its whole share of the round.
        for request in requests:
            request.engine.episode_opened()
            self._with_engines.add(request)
        for request in requests:
            task = asyncio.create_task(request.engine.sample(request.prompt, request.params, key=request.key))
            # A callback and not a `finally`: it also runs for a task that is cancelled before its first line.
            task.add_done_callback(partial(self._returned, request))
            request.running = task
            if request.answer.done():
                task.cancel()
        running = [request.running for request in requests if request.running is not None]
        try:
            samples = await asyncio.gather(*running, return_exceptions=True)
        except asyncio.CancelledError:  # the loop is being shut down, and whoever waits with it
            for request in requests:
                request.answer.cancel()
            raise
        finally:
            self._round = None
        for request, sample in zip(requests, samples, strict=True):
            if request.answer.done():
                continue
            if isinstance(sample, asyncio.CancelledError):
                request.answer.cancel()
            elif isinstance(sample, BaseException):
                request.answer.set_exception(sample)
            else:
                request.answer.set_result(sample)
        self._begin_round()

    def _returned(self, request: Request, _: object = None) -> None:
        """A request has left its engine, answered or not."""
        if request in self._with_engines:
            self._with_engines.remove(request)
            request.engine.episode_closed()


class Latest:
    """The engine of a pool's current policy. It waits with the pool, so that both can be asked at the same time."""

    def __init__(self, pool: PolicyPool) -> None:
        self.context = pool.context
        self.version = pool.version
        self.has_logprobs = pool.current.has_logprobs
        self._pool = pool

    async def sample(
        self, prompt_ids: Sequence[int] | Ids, params: SamplingParams, *, key: tuple[Any, ...] = ()
    ) -> Sample:
        return await self._pool.sample_with(self._pool.current, prompt_ids, params, key)

    async def load_weights(self, version: int) -> None:
        await self._pool.load_weights(version)

    def episode_opened(self) -> None:
        self._pool.episode_opened()

    def episode_closed(self) -> None:
        self._pool.episode_closed()

    async def close(self) -> None:
        await self._pool.close()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and kept buffers by name; of tied ones (an output head that is the embedding) the first name only."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor
    return named


def copy_weights(model: nn.Module, snapshot: nn.Module) -> None:
    """The model's weights into the snapshot's own tensors. Raises RunError when the two differ in their tensors."""
    put_weights(weights_of(model), snapshot)


@torch.no_grad()
def put_weights(weights: dict[str, Tensor], snapshot: nn.Module) -> None:
    own = weights_of(snapshot)
    differing = sorted(own.keys() ^ weights.keys()) or [n for n in own if own[n].shape != weights[n].shape]
    if differing:
        raise RunError(
            f"the snapshot of cross-policy sampling has another shape than the model: {len(differing)} tensors differ, "
            f"the first is {differing[0]}; resume with the model the run began with"
        )
    for name, tensor in own.items():
        tensor.copy_(weights[name])
