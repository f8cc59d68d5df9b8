"""Scheduling, stopping, seeds, versions, failure: what the local engine does around the model."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
import torch

from renma.errors import ContextOverflow, ModelError, RunError
from renma.inference import Sample, SamplingParams
from renma.inference.local import LocalEngine
from tests.inference.tiny_models import expected, ids, make

PROMPT = ids("Question: 1+1\n")


def same(one: Sample, other: Sample) -> bool:
    return (
        one.ids.tolist() == other.ids.tolist()
        and one.logprobs.tolist() == other.logprobs.tolist()
        and one.stop_reason == other.stop_reason
    )


def constant_model(token: int, gap: float = 8.0) -> Any:
    """A model that prefers `token` everywhere: all else in its head is zero, and its hidden state has a known sign."""
    model = make("llama")
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.lm_head = torch.nn.Linear(32, model.config.vocab_size)
        model.lm_head.weight.zero_()
        model.lm_head.bias.zero_()
        model.lm_head.bias[token] = gap
    return model


# ---- what is answered


def test_case_1_12_a_prompt_that_fills_the_context_is_refused_before_anything_runs(tokenizer: Any) -> None:
    engine = LocalEngine(make("llama"), tokenizer, context=20)

    async def main() -> None:
        for length in (20, 25):
            with pytest.raises(ContextOverflow, match=f"a prompt of {length} tokens .* context of 20"):
                await engine.sample([5] * length, SamplingParams(max_tokens=3))
        assert engine.stats["prefills"] == 0
        # 12 + at most 30: the action is cut where the context ends.
        sample = await engine.sample([5] * 12, SamplingParams(max_tokens=30, seed=1))
        assert (len(sample.ids), sample.stop_reason) == (8, "length")
        sample = await engine.sample([5] * 19, SamplingParams(max_tokens=30))
        assert (len(sample.ids), sample.stop_reason) == (1, "length")

    asyncio.run(main())


def test_case_6_1_both_sides_divide_by_the_temperature(tokenizer: Any) -> None:
    model = make("llama")
    engine = LocalEngine(model, tokenizer)
    params = SamplingParams(temperature=0.6, max_tokens=20, seed=4)
    sample = asyncio.run(engine.sample(PROMPT, params))
    np.testing.assert_allclose(sample.logprobs, expected(model, PROMPT, sample, 0.6), atol=1e-4)
    assert np.abs(sample.logprobs - expected(model, PROMPT, sample, 1.0)).max() > 0.1


def test_greedy_takes_the_likeliest_and_records_at_temperature_one(tokenizer: Any) -> None:
    model = make("qwen3")
    engine = LocalEngine(model, tokenizer)
    sample = asyncio.run(engine.sample(PROMPT, SamplingParams(temperature=0.0, max_tokens=10)))
    with torch.no_grad():
        logits = model.eval()(torch.tensor([PROMPT + sample.ids.tolist()])).logits[0, len(PROMPT) - 1 : -1]
    assert sample.ids.tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(sample.logprobs, expected(model, PROMPT, sample), atol=1e-4)


def test_case_6_3_a_sampled_stop_token_stays_with_its_own_logprob(tokenizer: Any) -> None:
    end = 1
    model = constant_model(end, gap=float(np.log(0.01 * 259 / 0.99)))  # the end token has probability 0.01
    engine = LocalEngine(model, tokenizer, context=96)

    async def main() -> None:
        samples = await asyncio.gather(
            *(engine.sample([9], SamplingParams(max_tokens=90, stop_ids=(end, 2), seed=s)) for s in range(40))
        )
        stopped = [sample for sample in samples if sample.stop_reason == "stop" and sample.ids[-1] == end]
        assert stopped
        for sample in stopped:
            assert sample.logprobs[-1] == pytest.approx(np.log(0.01), abs=1e-4)
            assert end not in sample.ids[:-1]
        for sample in samples:
            assert sample.stop_reason == "stop" or (len(sample.ids) == 90 and not {1, 2} & set(sample.ids.tolist()))

    asyncio.run(main())


def test_case_7_7_pad_and_end_ids_inside_a_prompt_are_tokens_like_others(tokenizer: Any) -> None:
    model = make("llama")
    model.config.pad_token_id = model.config.eos_token_id = 2
    engine = LocalEngine(model, tokenizer)
    prompts = [[5, 2, 6, 2, 2], [2], [2, 2, 7]]

    async def main() -> None:
        for ragged in (prompts, [[*p, 2, 2] for p in prompts]):
            samples = await asyncio.gather(*(engine.sample(p, SamplingParams(max_tokens=5, seed=1)) for p in ragged))
            for prompt, sample in zip(ragged, samples, strict=True):
                assert len(sample.ids) == 5
                np.testing.assert_allclose(sample.logprobs, expected(model, prompt, sample), atol=1e-4)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("written", "strings", "kept"),
    [
        ("Call: calc(1)\nmore", ("\n",), "Call: calc(1)\n"),
        ("a</tool> b", ("</tool>", "zzz"), "a</tool>"),
        ("naïve → done→", ("→",), "naïve →"),
        ("one STOP", (" STOP",), "one STOP"),
        (" x", (" ",), " "),
        ("no such thing", ("\n",), "no such thing"),
    ],
)
def test_stop_strings_end_with_the_token_that_completes_them(
    written: str, strings: tuple[str, ...], kept: str, tokenizer: Any
) -> None:
    # The prompt ends in the string already: what the policy did not write does not stop it.
    prompt = ids("go" + strings[0])
    model = constant_model(5)
    engine = LocalEngine(model, tokenizer)
    script(engine, [4 + byte for byte in written.encode()], len(prompt))
    params = SamplingParams(max_tokens=len(written.encode()), stop_strings=strings)
    sample = asyncio.run(engine.sample(prompt, params))
    assert sample.ids.tolist() == ids(kept)
    assert sample.stop_reason == ("stop" if any(string in written for string in strings) else "length")
    assert len(sample.ids) == len(sample.logprobs) == len(sample.versions)


def script(engine: LocalEngine, tokens: list[int], start: int) -> None:
    """Make the engine's head prefer `tokens` one after the other, in a request whose prompt has `start` tokens."""
    policy, sequences = engine._policy, engine._sequences
    plain = policy.head.__class__.__call__

    class Scripted(policy.head.__class__):  # type: ignore[name-defined,misc]
        def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = plain(self, hidden)
            logits[:, tokens[int(sequences.total[0]) - start]] += 100.0
            return logits

    policy.head.__class__ = Scripted


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "no tokens"),
        ([260], {}, "token ids 260..260, outside the model's 0..259"),
        ([-1, 4], {}, "outside"),
        ([4], {"temperature": -0.1}, "temperature is -0.1"),
        ([4], {"top_p": 0.0}, "top_p"),
        ([4], {"top_k": -1}, "top_k"),
        ([4], {"min_p": 1.0}, "min_p"),
        ([4], {"max_tokens": 0}, "max_tokens"),
        ([4], {"stop_strings": ("a", "")}, "stop_strings"),
    ],
)
def test_impossible_requests_are_refused(
    prompt: list[int], params: dict[str, Any], message: str, tokenizer: Any
) -> None:
    engine = LocalEngine(make("llama"), tokenizer)
    with pytest.raises(ModelError, match=message):
        asyncio.run(engine.sample(prompt, SamplingParams(**params)))


# ---- weights


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_case_6_9_no_old_weights_through_the_prefix_cache(name: str, tokenizer: Any) -> None:
    model = make(name)
    engine = LocalEngine(model, tokenizer, output_ids=torch.arange(4, 260))
    params = SamplingParams(max_tokens=12, seed=5)

    async def main() -> None:
        before = await engine.sample(PROMPT, params)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        await engine.load_weights(7)
        reused = engine.stats["reused_positions"]
        after = await engine.sample(PROMPT, params)
        assert engine.stats["reused_positions"] == reused
        fresh = await LocalEngine(model, tokenizer, output_ids=torch.arange(4, 260)).sample(PROMPT, params)
        assert same(after, fresh) and not same(after, before)
        assert (set(before.versions.tolist()), set(after.versions.tolist())) == ({0}, {7})

    asyncio.run(main())


def test_case_6_10_a_flip_of_the_argmax_shows_in_the_next_sample(tokenizer: Any) -> None:
    model = constant_model(40)
    engine = LocalEngine(model, tokenizer, output_ids=torch.tensor([40, 50]))
    params = SamplingParams(temperature=0.0, max_tokens=3)
    assert asyncio.run(engine.sample(PROMPT, params)).ids.tolist() == [40] * 3
    with torch.no_grad():
        model.lm_head.bias[50] = 20.0
    asyncio.run(engine.load_weights(1))
    assert asyncio.run(engine.sample(PROMPT, params)).ids.tolist() == [50] * 3


def test_weights_that_change_under_a_running_request(tokenizer: Any) -> None:
    model = make("llama")
    engine = LocalEngine(model, tokenizer)

    async def main() -> None:
        tasks = [
            asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=12, seed=s), key=(s,)))
            for s in range(3)
        ]
        while engine.stats["rounds"] < 4:
            await asyncio.sleep(0)
        early = [expected(model, PROMPT, partial) for partial in running(engine)]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        await engine.load_weights(1)
        for sample, old in zip(await asyncio.gather(*tasks), early, strict=True):
            count = len(old)
            assert sample.versions.tolist() == [0] * count + [1] * (12 - count)
            np.testing.assert_allclose(sample.logprobs[:count], old, atol=1e-4)
            np.testing.assert_allclose(sample.logprobs[count:], expected(model, PROMPT, sample)[count:], atol=1e-4)
        assert engine.stats["recomputed_positions"] > 0

    asyncio.run(main())


def running(engine: LocalEngine) -> list[Sample]:
    """What the running requests have sampled so far, in the order of their keys."""
    slots = engine._slots
    at = [(request.slot, slice(int(slots.count[request.slot]))) for request in sorted(slots.running, key=by_key)]
    return [
        Sample(*(a[slot, span].copy() for a in (slots.ids, slots.logprobs, slots.versions)), "aborted")
        for slot, span in at
    ]


def by_key(request: Any) -> Any:
    return request.order


# ---- seeds and order


def test_case_7_9_seeds(tokenizer: Any) -> None:
    engine = LocalEngine(constant_model(5, gap=0.0), tokenizer)  # a flat distribution

    def once(seeds: list[int]) -> list[list[int]]:
        async def main() -> list[Sample]:
            params = [SamplingParams(max_tokens=8, seed=seed) for seed in seeds]
            return await asyncio.gather(*(engine.sample(PROMPT, p) for p in params))

        return [sample.ids.tolist() for sample in asyncio.run(main())]

    assert once([1]) == once([1])
    assert once([1]) != once([2])
    assert len({tuple(row) for row in once([1, 2, 3, 4])}) == 4
    assert once([4, 3, 2, 1]) == once([1, 2, 3, 4])[::-1]


async def play(engine: LocalEngine, tasks: int, chaos: random.Random) -> dict[Any, Sample]:
    """Episodes of 1 to 3 turns that yield to the loop at random before they act."""
    answers: dict[Any, Sample] = {}

    async def episode(task: int) -> None:
        prompt = PROMPT + ids(f"{task // 3}")
        for turn in range(1 + task % 3):
            for _ in range(chaos.randrange(5)):
                await asyncio.sleep(0)
            params = SamplingParams(max_tokens=2 + (task * 5 + turn) % 7, seed=31 * task + turn)
            answers[task, turn] = sample = await engine.sample(prompt, params, key=(task, turn))
            prompt = prompt + sample.ids.tolist() + ids(" ok\n")
        engine.episode_closed()

    for _ in range(tasks):
        engine.episode_opened()
    order = list(range(tasks))
    chaos.shuffle(order)
    await asyncio.gather(*(episode(task) for task in order))
    return answers


@pytest.mark.parametrize("slots", [2, 5, 16])
def test_deterministic_to_the_last_bit_whatever_the_order_of_arrival(slots: int, tokenizer: Any) -> None:
    model = make("gemma3")
    first: dict[Any, Sample] = {}
    counted: dict[str, Any] = {}
    for seed in range(4):
        engine = LocalEngine(model, tokenizer, slots=slots)
        answers = asyncio.run(play(engine, 9, random.Random(seed)))
        first, counted = first or answers, counted or engine.stats
        assert answers.keys() == first.keys() and len(answers) == 18
        assert all(same(answers[key], first[key]) for key in answers)
        assert engine.stats == counted


def test_not_deterministic_does_not_wait_for_an_idle_episode(tokenizer: Any) -> None:
    async def main(engine: LocalEngine) -> bool:
        engine.episode_opened()
        engine.episode_opened()
        task = asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=4)))
        for _ in range(20):
            await asyncio.sleep(0)
        waited = not task.done()
        engine.episode_closed()
        await task
        return waited

    model = make("llama")
    assert not asyncio.run(main(LocalEngine(model, tokenizer, deterministic=False)))
    assert asyncio.run(main(LocalEngine(model, tokenizer)))


def test_keys_order_the_admission(tokenizer: Any) -> None:
    engine = LocalEngine(make("llama"), tokenizer, slots=1)
    finished: list[Any] = []

    async def one(key: tuple[Any, ...]) -> None:
        await engine.sample(PROMPT, SamplingParams(max_tokens=2), key=key)
        finished.append(key)

    async def main() -> None:
        await asyncio.gather(*(one(key) for key in [("b", 1), (2, 0), (), (10,), (2,), ("a",)]))

    asyncio.run(main())
    assert finished == [(), (2,), (2, 0), (10,), ("a",), ("b", 1)]


# ---- continuous batching, cancellation, failure


def test_more_requests_than_slots_all_complete_and_slots_stay_busy(tokenizer: Any) -> None:
    model = make("llama")
    engine = LocalEngine(model, tokenizer, slots=4)
    lengths = [1 + (7 * i) % 20 for i in range(24)]

    async def main() -> None:
        prompts = [PROMPT + ids(str(i)) for i in range(24)]
        samples = await asyncio.gather(
            *(
                engine.sample(p, SamplingParams(max_tokens=n, seed=i), key=(i,))
                for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
            )
        )
        for prompt, length, sample in zip(prompts, lengths, samples, strict=True):
            assert len(sample.ids) == length
            np.testing.assert_allclose(sample.logprobs, expected(model, prompt, sample), atol=1e-4)

    asyncio.run(main())
    assert engine.stats["sampled_tokens"] == sum(lengths)
    # A batch that waited for its longest would take 6 x 20 rounds; a freed slot is filled in the next.
    assert engine.stats["rounds"] < sum(lengths) / 4 + 20
    assert engine.stats["busy_slot_rounds"] / engine.stats["rounds"] > 3


def test_cancelling_frees_the_slot_and_leaves_the_others_alone(tokenizer: Any) -> None:
    model = make("llama")
    engine = LocalEngine(model, tokenizer, slots=3)

    async def main() -> None:
        tasks = [
            asyncio.create_task(engine.sample(PROMPT + ids(str(i)), SamplingParams(max_tokens=30, seed=i), key=(i,)))
            for i in range(5)
        ]
        while engine.stats["rounds"] < 5:
            await asyncio.sleep(0)
        tasks[0].cancel()  # running
        tasks[4].cancel()  # waiting
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError) and isinstance(done[4], asyncio.CancelledError)
        for i in (1, 2, 3):
            sample = done[i]
            assert isinstance(sample, Sample) and len(sample.ids) == 30
            np.testing.assert_allclose(sample.logprobs, expected(model, PROMPT + ids(str(i)), sample), atol=1e-4)
        # The cancelled one stopped at once: three whole actions, and the few tokens it had.
        assert engine.stats["sampled_tokens"] <= 3 * 30 + 8
        assert engine._slots.busy == 0 and engine.stats["prompt_positions"] == 4 * (len(PROMPT) + 1)

    asyncio.run(main())


def test_a_fault_in_the_model_reaches_every_request_and_the_engine_recovers(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama")
    engine = LocalEngine(model, tokenizer, slots=2)
    params = SamplingParams(max_tokens=5, seed=1)
    plain = asyncio.run(engine.sample(PROMPT, params))

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise FloatingPointError("the matrix is on fire")

    async def main() -> list[Any]:
        requests = (engine.sample(PROMPT + ids(str(i)), params) for i in range(4))
        return await asyncio.gather(*requests, return_exceptions=True)

    monkeypatch.setattr(model.model.layers[1].mlp.down_proj, "forward", broken)
    assert [str(error) for error in asyncio.run(main())] == ["the matrix is on fire"] * 4
    monkeypatch.undo()
    assert all(module.training for module in model.modules())
    again = asyncio.run(engine.sample(PROMPT, params))
    assert again.ids.tolist() == plain.ids.tolist()


def test_diverged_weights_are_an_error_that_says_so(tokenizer: Any) -> None:
    model = make("llama")
    engine = LocalEngine(model, tokenizer)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="not finite"):
        asyncio.run(engine.sample(PROMPT, SamplingParams()))


def test_a_loop_that_was_abandoned_leaves_nothing_behind(tokenizer: Any) -> None:
    engine = LocalEngine(make("llama"), tokenizer, slots=2)
    params = SamplingParams(max_tokens=40, seed=3)
    whole = asyncio.run(engine.sample(PROMPT, params))

    async def impatient() -> None:
        asyncio.create_task(engine.sample(PROMPT, params))  # noqa: RUF006
        for _ in range(4):
            await asyncio.sleep(0)

    asyncio.run(impatient())  # asyncio.run cancels what is left
    assert engine._slots.busy == 0
    loop = asyncio.new_event_loop()
    task = loop.create_task(impatient())
    loop.run_until_complete(task)  # nobody cancels
    assert engine._slots.busy == 1
    again = asyncio.run(engine.sample(PROMPT, params))
    assert again.ids.tolist() == whole.ids.tolist() and engine._slots.busy == 0
    for left in asyncio.all_tasks(loop):
        left.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_close_ends_what_runs_as_aborted(tokenizer: Any) -> None:
    engine = LocalEngine(make("llama"), tokenizer, slots=1)

    async def main() -> None:
        tasks = [asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=50), key=(i,))) for i in range(2)]
        while engine.stats["rounds"] < 3:
            await asyncio.sleep(0)
        await engine.close()
        running, waiting = await asyncio.gather(*tasks)
        assert running.stop_reason == waiting.stop_reason == "aborted"
        assert len(running.ids) == len(running.logprobs) > 2 and len(waiting.ids) == 0
        with pytest.raises(RunError, match="closed"):
            await engine.sample(PROMPT, SamplingParams())

    asyncio.run(main())
