"""Cross-policy sampling: whose token is whose, who is drawn, and that two engines never wait for each other."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch

from renma.errors import ContextOverflow, RecipeError, RunError
from renma.inference import Sample, SamplingParams
from renma.inference.local import LocalEngine
from renma.inference.pool import PolicyPool, weights_of
from renma.seeding import seed_for
from tests.inference.tiny_models import expected, ids, make

PROMPT = ids("Question: 1+1\n")


def pool_of(tokenizer: Any, model: Any, *, slots: int = 8, **options: Any) -> PolicyPool:
    snapshot = copy.deepcopy(model).requires_grad_(False)
    engines = (LocalEngine(m, tokenizer, slots=slots) for m in (model, snapshot))
    return PolicyPool(*engines, model, snapshot, **options)


@torch.no_grad()
def shift(model: Any, seed: int) -> None:
    """Other weights, as after an update."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


async def moved(pool: PolicyPool, model: Any, *versions: int) -> None:
    for version in versions:
        shift(model, version)
        await pool.load_weights(version)


async def play(
    pool: Any,
    episodes: int,
    turns: int,
    *,
    delays: Any = lambda episode, turn: 0,
    places: int | None = None,
    run: int = 0,
) -> dict[tuple[int, int], tuple[list[int], Sample]]:
    """Episodes of growing prompts, `places` at a time, as the runner plays them; each waits `delays` between turns."""
    waiting, done = list(range(episodes)), {}

    async def place() -> None:
        pool.episode_opened()
        try:
            while waiting:
                episode = waiting.pop(0)
                prompt = list(PROMPT)
                for turn in range(turns):
                    for _ in range(delays(episode, turn)):
                        await asyncio.sleep(0)
                    params = SamplingParams(max_tokens=2 + (episode + turn) % 5, seed=seed_for(run, episode, turn))
                    sample = await pool.sample(prompt, params, key=(episode, 0, turn))
                    done[episode, turn] = (list(prompt), sample)
                    prompt += [*sample.ids.tolist(), *ids("=2\n")]
        finally:
            pool.episode_closed()

    jobs = [place() for _ in range(places or episodes)]
    await asyncio.wait_for(asyncio.gather(*jobs), 60)
    return done


def plain(done: dict[tuple[int, int], tuple[list[int], Sample]]) -> dict[Any, Any]:
    return {
        key: (sample.ids.tolist(), sample.logprobs.tolist(), sample.versions.tolist())
        for key, (_, sample) in sorted(done.items())
    }


@pytest.mark.parametrize("mode", ["step", "mixed"])
def test_each_token_has_the_logprob_and_version_of_the_policy_that_sampled_it(tokenizer: Any, mode: Any) -> None:
    model = make("llama")
    pool = pool_of(tokenizer, model, mode=mode, stale_share=0.5)
    old = copy.deepcopy(model)

    async def main() -> dict[tuple[int, int], tuple[list[int], Sample]]:
        await moved(pool, model, 1, 2)
        return await play(pool, 10, 3)

    done = asyncio.run(main())
    by_version = {0: old, 2: model}
    for prompt, sample in done.values():
        (version,) = set(sample.versions.tolist())
        np.testing.assert_allclose(sample.logprobs, expected(by_version[version], prompt, sample), atol=1e-4)
        other = expected(by_version[2 - version], prompt, sample)
        assert np.abs(sample.logprobs - other).max() > 1e-3, "the other policy would have said something else"
    versions = {key: int(sample.versions[0]) for key, (_, sample) in done.items()}
    assert set(versions.values()) == {0, 2}
    mixing = [episode for episode in range(10) if len({versions[episode, turn] for turn in range(3)}) > 1]
    assert bool(mixing) == (mode == "step"), "mixed: a trajectory has one policy; step: it mixes them"


def test_case_shares_are_kept_and_draws_depend_on_the_seed_alone(tokenizer: Any) -> None:
    pool = pool_of(tokenizer, make("llama"), stale_share=0.25)
    drawn = [pool.drawn(SamplingParams(seed=s), (s % 7, 0, 1)) for s in range(4000)]
    assert np.mean([engine is pool.stale for engine in drawn]) == pytest.approx(0.25, abs=0.03)
    assert drawn == [pool.drawn(SamplingParams(seed=s), ()) for s in range(4000)]

    mixed = pool_of(tokenizer, make("llama"), mode="mixed", stale_share=0.25)
    whole = [mixed.drawn(SamplingParams(seed=p), (p, m, 0)) for p in range(500) for m in range(4)]
    assert np.mean([engine is mixed.stale for engine in whole]) == pytest.approx(0.25, abs=0.04)
    assert whole == [mixed.drawn(SamplingParams(seed=p + 1), (p, m, 5)) for p in range(500) for m in range(4)]
    members = [{mixed.drawn(SamplingParams(), (p, m, 0)) is mixed.stale for m in range(4)} for p in range(50)]
    assert any(len(kinds) > 1 for kinds in members), "members of a group are drawn apart"
    other = pool_of(tokenizer, make("llama"), mode="mixed", seed=1)
    assert [e is mixed.stale for e in whole] != [
        other.drawn(SamplingParams(), (p, m, 0)) is other.stale for p in range(500) for m in range(4)
    ]


@pytest.mark.parametrize("slots", [1, 3, 16])
@pytest.mark.parametrize("mode", ["step", "mixed"])
def test_timing_changes_no_bit_and_nothing_deadlocks(tokenizer: Any, slots: int, mode: Any) -> None:
    """One slot and several episodes too; environments that are slow here or there."""

    def sampled(delays: Any) -> dict[Any, Any]:
        model = make("qwen3")
        pool = pool_of(tokenizer, model, slots=slots, mode=mode, stale_share=0.4)

        async def main() -> dict[Any, Any]:
            await moved(pool, model, 1)
            first = plain(await play(pool, 7, 3, delays=delays, places=5))
            await moved(pool, model, 2)
            return first | {("after", *key): value for key, value in plain(await play(pool, 4, 2, run=1)).items()}

        return asyncio.run(main())

    reference = sampled(lambda episode, turn: 0)
    assert len(reference) == 7 * 3 + 4 * 2
    for delays in (
        lambda episode, turn: 30 if episode == 2 else 3 * episode,
        lambda episode, turn: (episode * 7 + turn * 5) % 11,
    ):
        assert sampled(delays) == reference


def test_the_snapshot_is_refreshed_when_due_and_only_then(tokenizer: Any) -> None:
    model = make("llama")
    pool = pool_of(tokenizer, model, refresh_every=3)
    snapshot = weights_of(pool._snapshot)
    name = next(iter(snapshot))

    async def main() -> list[tuple[int, int, bool]]:
        seen = []
        for version in range(1, 8):
            await moved(pool, model, version)
            same = bool((snapshot[name] == weights_of(model)[name]).all())
            seen.append((pool.version, pool.snapshot_version, same))
        return seen

    seen = asyncio.run(main())
    assert seen == [(v, v // 3 * 3, v % 3 == 0) for v in range(1, 8)]
    assert (pool.current.version, pool.stale.version, pool.latest.version) == (7, 6, 7)


def test_new_weights_under_an_old_version_reach_the_snapshot(tokenizer: Any) -> None:
    """A cold start changes the weights and the version stays 0: its result is the policy of version 0."""
    model = make("llama")
    pool = pool_of(tokenizer, model)
    asyncio.run(moved(pool, model, 0))
    for name, tensor in weights_of(pool._snapshot).items():
        assert torch.equal(tensor, weights_of(model)[name])


def test_a_resumed_pool_samples_what_the_uninterrupted_one_does(tokenizer: Any) -> None:
    model = make("llama")
    pool = pool_of(tokenizer, model, refresh_every=2, stale_share=0.5)

    async def first() -> dict[str, Any]:
        await moved(pool, model, 1, 2, 3)
        await play(pool, 4, 2)  # what it leaves in the caches must not be felt
        return {"state": pool.state_dict(), "model": model.state_dict()}

    kept = copy.deepcopy(asyncio.run(first()))

    async def second(pool: PolicyPool) -> dict[Any, Any]:
        await pool.load_weights(3)
        return plain(await play(pool, 4, 3, run=5))

    wanted = asyncio.run(second(pool))
    restored = make("llama", seed=9)
    resumed = pool_of(tokenizer, restored, refresh_every=2, stale_share=0.5)
    restored.load_state_dict(kept["model"])
    resumed.load_state_dict(kept["state"])
    assert asyncio.run(second(resumed)) == wanted
    assert resumed.snapshot_version == 2
    versions = {v for _, _, tokens in wanted.values() for v in tokens}
    assert versions == {2, 3}


def test_tied_weights_are_kept_once_and_another_model_is_refused(tokenizer: Any) -> None:
    tied = make("gpt2")
    pool = pool_of(tokenizer, tied)
    state = pool.state_dict()["snapshot"]
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    with pytest.raises(RunError, match="another shape"):
        pool_of(tokenizer, make("llama")).load_state_dict(pool.state_dict())
    with pytest.raises(RunError, match="another shape"):
        PolicyPool(pool.current, pool.stale, make("llama"), pool._snapshot)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"stale_share": 1.0}, "stale_share"), ({"refresh_every": 0}, "refresh_every"), ({"mode": "turn"}, "mode 'turn'")],
)
def test_options_that_make_no_pool(tokenizer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        pool_of(tokenizer, make("llama"), **options)


def test_a_refused_or_withdrawn_request_holds_nobody_up(tokenizer: Any) -> None:
    pool = pool_of(tokenizer, make("llama"), slots=1, stale_share=0.5)

    async def refused() -> None:
        pool.episode_opened()
        try:
            with pytest.raises(ContextOverflow):
                await pool.sample([5] * 200, SamplingParams(seed=3), key=(90, 0, 0))
        finally:
            pool.episode_closed()

    async def impatient(number: int) -> None:
        """Opens a place, asks, and is cancelled: while held, or while sampling."""
        pool.episode_opened()
        try:
            await pool.sample(PROMPT, SamplingParams(max_tokens=20, seed=number), key=(number, 0, 0))
        finally:
            pool.episode_closed()

    async def main() -> None:
        for yields in (1, 4, 12):  # held; just handed over; being sampled
            jobs = [asyncio.create_task(impatient(n)) for n in range(4)]
            for _ in range(yields):
                await asyncio.sleep(0)
            jobs[1].cancel()
            jobs[2].cancel()
            ended = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 60)
            assert [isinstance(end, asyncio.CancelledError) for end in ended] == [False, True, True, False]
        done, _ = await asyncio.gather(play(pool, 3, 2), refused())
        assert len(done) == 6
        await asyncio.sleep(0)
        assert pool._episodes == 0 and not pool._with_engines
        assert pool.current._episodes == 0 and pool.stale._episodes == 0  # type: ignore[attr-defined]

    asyncio.run(main())


def test_the_latest_policy_can_be_asked_beside_the_pool(tokenizer: Any) -> None:
    model = make("llama")
    pool = pool_of(tokenizer, model, slots=2, stale_share=0.5)

    async def main() -> tuple[Any, Any]:
        await moved(pool, model, 1)
        return await asyncio.gather(play(pool, 3, 4), play(pool.latest, 5, 2, run=9))

    mixed, latest = asyncio.run(main())
    assert {int(v) for _, sample in mixed.values() for v in sample.versions} == {0, 1}
    assert {int(v) for _, sample in latest.values() for v in sample.versions} == {1}


def test_one_loop_after_another_even_after_an_abandoned_one(tokenizer: Any) -> None:
    pool = pool_of(tokenizer, make("llama"), stale_share=0.5)
    loop = asyncio.new_event_loop()

    async def abandoned() -> None:
        pool.episode_opened()
        jobs = [pool.sample(PROMPT, SamplingParams(max_tokens=60, seed=s), key=(s, 0, 0)) for s in range(4)]
        await asyncio.gather(*jobs)

    task = loop.create_task(abandoned())
    loop.run_until_complete(asyncio.sleep(0, None))
    for _ in range(4):
        loop.run_until_complete(asyncio.sleep(0))
    assert not task.done()
    pool.episode_closed()
    done = asyncio.run(play(pool, 4, 2))
    assert len(done) == 8
    assert pool.current._episodes == 0 and pool.stale._episodes == 0  # type: ignore[attr-defined]
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()


def test_without_open_episodes_requests_go_straight_through(tokenizer: Any) -> None:
    pool = pool_of(tokenizer, make("llama"), stale_share=0.5)

    async def main() -> list[Sample]:
        ask = [pool.sample(PROMPT, SamplingParams(max_tokens=4, seed=s)) for s in range(6)]
        samples = await asyncio.gather(*ask)
        await pool.close()
        with pytest.raises(RunError, match="closed"):
            await pool.sample(PROMPT, SamplingParams())
        return samples

    assert [len(sample.ids) for sample in asyncio.run(main())] == [4] * 6
