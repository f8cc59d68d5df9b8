"""The vllm engine over a backend that only counts: stops, versions, changing weights, refusals, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from renma.errors import ContextOverflow, ModelError, RecipeError, RunError
from renma.inference import ENGINES, SamplingParams
from renma.inference.vllm import engine as engine_module
from renma.inference.vllm import in_process
from renma.inference.vllm.backend import Part, Settings
from renma.inference.vllm.engine import VllmEngine
from renma.inference.vllm.weights import PolicyFiles
from renma.inference.vllm.worker import WeightReader
from renma.models.policy import Policy
from renma.recipe import Component, RolloutSection
from renma.recipe_checks import check_recipe, derived_facts
from renma.recipe_load import load_recipe
from renma.training.setup import build
from tests.inference.tiny_models import VOCABULARY, byte_tokenizer, ids, make

PROMPT = ids("Question: 1+1\n")
TOKENIZER = byte_tokenizer()


@dataclass
class FakeBackend:
    """Samples the prompt's last id + 1, + 2, …, at -1 each; `script` may answer instead.

    hold_after: a call with more than so many tokens to sample waits there until it is aborted.
    deaf: so many abortions find no request, as when it is still on its way.
    """

    script: Callable[[list[int], SamplingParams], Part] | None = None
    hold_after: int | None = None
    deaf: int = 0
    calls: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    started_with: set[str] = field(default_factory=set)
    weights: list[float] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    fail: Exception | None = None
    held: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    loading: Callable[[], Awaitable[None]] | None = None

    async def start(self, folder: Path) -> None:
        self.events.append("start")
        self.folders.append(folder)
        if self.fail is not None:
            raise self.fail
        self.started_with = {file.name for file in folder.iterdir()}
        self._read(folder)

    async def generate(self, name: str, prompt: Sequence[int], params: SamplingParams) -> Part:
        self.calls.append((list(prompt), params))
        if self.script is not None:
            return self.script(list(prompt), params)
        sampled = [prompt[-1] + 1 + i for i in range(params.max_tokens)]
        if self.hold_after is None or params.max_tokens <= self.hold_after:
            return Part(sampled, [-1.0] * len(sampled), "length")
        self.held[name] = asyncio.get_running_loop().create_future()
        self.arrived.set()
        try:
            await self.held[name]
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise
        kept = sampled[: self.hold_after]
        return Part(kept, [-1.0] * len(kept), "aborted")

    async def abort(self, names: Sequence[str]) -> None:
        self.events.append("abort")
        self.deaf -= 1
        for name in names if self.deaf < 0 else ():
            if not self.held[name].done():
                self.held[name].set_result(None)

    async def load(self, folder: Path) -> None:
        self.events.append("load")
        self.folders.append(folder)
        if self.loading is not None:
            await self.loading()
        if self.fail is not None:
            raise self.fail
        self._read(folder)

    async def close(self) -> None:
        self.events.append("close")

    def _read(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        self.weights.append(float(tensors["model.norm.weight"][0]))


def make_engine(backend: FakeBackend, model: Any = None, context: int = 96) -> VllmEngine:
    files = PolicyFiles(make("llama") if model is None else model, TOKENIZER)
    return VllmEngine(backend, files, TOKENIZER, context=context, vocabulary=VOCABULARY)


# ---- starting, and the weights


def test_vllm_starts_with_the_first_request_from_a_whole_folder_that_is_then_gone() -> None:
    backend = FakeBackend()
    engine = make_engine(backend)
    assert backend.events == []

    async def main() -> None:
        await asyncio.gather(*(engine.sample(PROMPT, SamplingParams(max_tokens=2, seed=s)) for s in range(3)))

    asyncio.run(main())
    assert backend.events == ["start"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= backend.started_with
    assert not backend.folders[0].exists()


def test_new_weights_reach_vllm_each_time_and_the_first_time_by_starting_it() -> None:
    backend, model = FakeBackend(), make("llama")
    engine = make_engine(backend, model)

    async def main() -> None:
        for version in (0, 1, 1):  # the same version again: a cold start has trained it
            with torch.no_grad():
                model.model.norm.weight.fill_(version + len(backend.events))
            await engine.load_weights(version)
            assert (await engine.sample(PROMPT, SamplingParams(max_tokens=1))).versions.tolist() == [version]

    asyncio.run(main())
    assert backend.events == ["start", "load", "load"]
    assert backend.weights == [0.0, 2.0, 3.0]
    assert not any(folder.exists() for folder in backend.folders)


def test_a_lora_policy_reaches_vllm_merged_under_the_names_of_the_plain_model(tmp_path: Path) -> None:
    plain = make("llama")
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    adapted = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    with PolicyFiles(adapted, TOKENIZER, tmp_path).written(whole=False) as folder:
        assert folder.parent == tmp_path
        written = load_file(folder / "model.safetensors")
    assert written.keys() == before.keys()
    changed = {name for name in before if not torch.equal(written[name], before[name])}
    assert changed == {name for name in before if "q_proj" in name}
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    torch.testing.assert_close(
        written["model.layers.0.self_attn.q_proj.weight"], layer.base_layer.weight + layer.get_delta_weight("default")
    )


def test_a_folder_that_cannot_be_written_is_named() -> None:
    engine = VllmEngine(
        FakeBackend(), PolicyFiles(make("llama"), TOKENIZER, Path("/nowhere")), TOKENIZER, context=96, vocabulary=260
    )
    with pytest.raises(RunError, match="cannot write the weights for vllm .* set rollout.engine.folder"):
        asyncio.run(engine.sample(PROMPT, SamplingParams()))


def test_the_worker_gives_vllm_every_tensor_of_every_file(tmp_path: Path) -> None:
    class Packed(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight, self.quant_method = torch.nn.Parameter(torch.zeros(size), requires_grad=False), self
            self.cpu_linear = self.packed = 0.0

        def process_weights_after_loading(self, layer: Packed) -> None:
            layer.packed = float(layer.weight.sum())

    embedding, head, emptied, plain = Packed(2), Packed(2), Packed(0), torch.nn.Linear(2, 2)
    head.weight = embedding.weight

    class Worker(WeightReader):
        class model_runner:
            get_model = staticmethod(lambda: torch.nn.ModuleList([embedding, head, emptied, plain]))

        def reload_weights(self, weights_iterator: Any) -> None:
            self.loaded = dict(weights_iterator)
            with torch.no_grad():
                embedding.weight.copy_(self.loaded["a"])

    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.full((1,), 7.0)}, tmp_path / "model-2.safetensors")
    worker = Worker()
    assert worker.renma_load_weights(str(tmp_path)) == 3
    assert {name: tensor.tolist() for name, tensor in worker.loaded.items()} == {"a": [1, 1], "b": [0, 0, 0], "c": [7]}
    assert (embedding.packed, head.packed, emptied.packed) == (2, 2, 0), "a tied head is packed anew, too"
    with pytest.raises(FileNotFoundError, match="no safetensors"):
        worker.renma_load_weights(str(tmp_path / "other"))


# ---- requests while weights change


def test_a_running_request_goes_on_under_the_new_weights_with_each_tokens_version() -> None:
    backend = FakeBackend(hold_after=3)
    engine = make_engine(backend)

    async def main() -> None:
        running = asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=6, seed=4)))
        await backend.arrived.wait()
        waiting: list[asyncio.Task[Any]] = []

        async def meanwhile() -> None:
            waiting.append(asyncio.create_task(engine.sample([5], SamplingParams(max_tokens=1))))
            await asyncio.sleep(0)
            assert len(backend.calls) == 1, "nothing is sent while weights change"

        backend.loading = meanwhile
        await engine.load_weights(1)
        sample = await running
        assert sample.ids.tolist() == [PROMPT[-1] + 1 + i for i in range(6)]
        assert sample.versions.tolist() == [0, 0, 0, 1, 1, 1]
        assert (len(sample.logprobs), sample.stop_reason) == (6, "length")
        assert (await waiting[0]).versions.tolist() == [1]

    asyncio.run(main())
    assert backend.events == ["start", "abort", "load"]
    (first, asked), (second, again) = backend.calls[0], next(c for c in backend.calls[1:] if len(c[0]) > 1)
    assert second == [*first, *[PROMPT[-1] + 1 + i for i in range(3)]]
    assert (asked.max_tokens, again.max_tokens) == (6, 3)
    assert asked.seed == 4 and again.seed != 4, "the same seed would draw the same numbers again"
    assert engine.stats == {"requests": 2, "calls": 3, "sampled_tokens": 7}


def test_a_request_that_was_on_its_way_when_all_were_aborted_is_aborted_again(monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_module, "ABORT_AGAIN", 0.01)
    backend = FakeBackend(hold_after=2, deaf=2)
    engine = make_engine(backend)

    async def main() -> None:
        running = asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=4)))
        await backend.arrived.wait()
        await engine.load_weights(5)
        assert (await running).versions.tolist() == [0, 0, 5, 5]

    asyncio.run(main())
    assert backend.events == ["start", "abort", "abort", "abort", "load"]


def test_a_vllm_that_never_ends_its_requests_is_given_up(monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_module, "ABORT_AGAIN", 0.01)
    monkeypatch.setattr(engine_module, "ABORT_SECONDS", 0.03)
    backend = FakeBackend(hold_after=2, deaf=10**6)
    engine = make_engine(backend)

    async def main() -> None:
        running = asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=4)))
        await backend.arrived.wait()
        with pytest.raises(RunError, match="vllm still runs 1 requests"):
            await engine.load_weights(5)
        with pytest.raises(RunError, match="did not take the weights of version 5"):
            await engine.sample(PROMPT, SamplingParams())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def test_an_abortion_from_outside_ends_the_request() -> None:
    backend = FakeBackend(hold_after=2)
    engine = make_engine(backend)

    async def main() -> None:
        running = asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=4)))
        await backend.arrived.wait()
        await backend.abort(list(backend.held))
        sample = await running
        assert (len(sample.ids), sample.stop_reason) == (2, "aborted")

    asyncio.run(main())


def test_cancelling_a_request_cancels_it_in_vllm_and_weights_can_change_then() -> None:
    backend = FakeBackend(hold_after=2)
    engine = make_engine(backend)

    async def main() -> None:
        running = asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=4)))
        await backend.arrived.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await engine.load_weights(1)

    asyncio.run(main())
    assert backend.events == ["start", "cancelled", "load"]


def test_close_ends_what_runs_with_what_it_has() -> None:
    backend = FakeBackend(hold_after=2)
    engine = make_engine(backend)

    async def main() -> None:
        running = asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=4)))
        await backend.arrived.wait()
        await engine.close()
        sample = await running
        assert (len(sample.ids), sample.stop_reason) == (2, "aborted")
        with pytest.raises(RunError, match="was closed"):
            await engine.sample(PROMPT, SamplingParams())
        with pytest.raises(RunError, match="was closed"):
            await engine.load_weights(1)
        await engine.close()

    asyncio.run(main())
    assert backend.events == ["start", "abort", "close"]


def test_one_engine_serves_several_loops_in_turn() -> None:
    backend = FakeBackend(hold_after=9)
    engine = make_engine(backend)

    async def abandon() -> None:
        task = asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=20)))
        await backend.arrived.wait()
        assert not task.done()

    asyncio.run(abandon())
    sample = asyncio.run(engine.sample(PROMPT, SamplingParams(max_tokens=3)))
    assert len(sample.ids) == 3
    asyncio.run(engine.load_weights(2))
    assert engine.version == 2 and backend.events[-1] == "load"


# ---- stopping


@pytest.mark.parametrize(
    ("written", "strings", "kept"),
    [
        ("Call: calc(1)\nmore", ("\n",), "Call: calc(1)\n"),
        ("a</tool> b", ("</tool>", "zzz"), "a</tool>"),
        ("naïve → done→", ("→",), "naïve →"),
        ("no such thing", ("\n",), "no such thing"),
    ],
)
def test_an_action_is_cut_after_the_token_that_completes_a_stop_string(
    written: str, strings: tuple[str, ...], kept: str
) -> None:
    def overrun(prompt: list[int], params: SamplingParams) -> Part:
        tokens = ids(written)
        return Part(tokens, [-float(i) for i in range(len(tokens))], "length")

    engine = make_engine(FakeBackend(overrun))
    params = SamplingParams(max_tokens=len(ids(written)), stop_strings=strings)
    sample = asyncio.run(engine.sample(ids("go" + strings[0]), params))
    assert sample.ids.tolist() == ids(kept)
    assert sample.logprobs.tolist() == [-float(i) for i in range(len(ids(kept)))]
    assert len(sample.versions) == len(sample.ids)
    assert sample.stop_reason == ("length" if kept == written else "stop")


@given(
    stream=st.lists(st.sampled_from([*ids("ab\n"), 1]), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 4), max_size=12),
    stop_id=st.booleans(),
    strings=st.sampled_from([(), ("ab",), ("\n", "aab")]),
)
@settings(max_examples=60, deadline=None)
def test_an_action_does_not_depend_on_the_parts_it_comes_in(
    stream: list[int], cuts: list[int], stop_id: bool, strings: tuple[str, ...]
) -> None:
    """Wherever vLLM leaves off (saying "stop" where there is no stop string), the same tokens make the action."""
    params = SamplingParams(max_tokens=len(stream), stop_ids=(1,) if stop_id else (), stop_strings=strings)
    lengths = iter(cuts)

    def script(prompt: list[int], asked: SamplingParams) -> Part:
        done = len(prompt) - 1
        assert prompt == [5, *stream[:done]] and asked.max_tokens == len(stream) - done
        count = min(next(lengths, 99), asked.max_tokens)
        part = stream[done : done + count]
        return Part(
            part, [-float(i) for i in range(done, done + count)], "stop" if done + count < len(stream) else "length"
        )

    sample = asyncio.run(make_engine(FakeBackend(script)).sample([5], params))
    text = "".join("\x00" if token == 1 else chr(token - 4) for token in stream)
    ends = [text.index(s) + len(s) for s in strings if s in text] + (
        [text.index("\x00") + 1] if stop_id and "\x00" in text else []
    )
    want = min(ends, default=len(stream))
    assert sample.ids.tolist() == stream[:want]
    assert sample.logprobs.tolist() == [-float(i) for i in range(want)]
    assert sample.stop_reason == ("stop" if ends else "length")


# ---- refusals


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"top_p": 0.9}, "top_p=0.9: vllm's log-probabilities would be those of the cut set"),
        ({"top_k": 5}, "leave top_k at 0, or use rollout.engine: {type: local}"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"temperature": 0.001}, "temperature 0.001: vllm samples at 0 or from 0.01 to 2"),
        ({"temperature": 3.0}, "temperature 3"),
        ({"temperature": -1.0}, "sampling parameter temperature is -1.0: it must be 0 or more"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop_strings": ("",)}, "stop_strings"),
    ],
)
def test_what_vllm_cannot_do_exactly_is_refused(params: dict[str, Any], message: str) -> None:
    backend = FakeBackend()
    with pytest.raises(ModelError, match=message):
        asyncio.run(make_engine(backend).sample(PROMPT, SamplingParams(**params)))
    assert not backend.calls


def test_greedy_requests_may_name_a_cut_that_does_nothing() -> None:
    params = SamplingParams(temperature=0.0, top_k=5, top_p=0.5, max_tokens=2)
    assert len(asyncio.run(make_engine(FakeBackend()).sample(PROMPT, params)).ids) == 2


def test_prompts_are_checked_before_anything_starts() -> None:
    backend = FakeBackend()
    engine = make_engine(backend, context=20)

    async def main() -> None:
        with pytest.raises(ContextOverflow, match="a prompt of 20 tokens leaves no room in a context of 20"):
            await engine.sample([5] * 20, SamplingParams())
        for prompt, message in (([], "no tokens"), ([260], "outside the model's 0..259")):
            with pytest.raises(ModelError, match=message):
                await engine.sample(prompt, SamplingParams())
        assert not backend.events
        sample = await engine.sample([5] * 12, SamplingParams(max_tokens=30))
        assert (len(sample.ids), sample.stop_reason) == (8, "length")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (Part([5, 6], [-1.0], "length"), "2 ids with 1 log-probabilities"),
        (Part([5] * 5, [-1.0] * 5, "stop"), "5 tokens where 4 were the most"),
        (Part([5], [-1.0], "length"), "1 tokens where 4 were the most"),
        (Part([], [], "stop"), "no token"),
        (Part([5, 260], [-1.0, -1.0], "stop"), "ids 5..260 outside"),
        (Part([-1], [-1.0], "stop"), "ids -1..-1 outside"),
        (Part([5], [float("nan")], "stop"), "not finite"),
    ],
)
def test_an_answer_that_does_not_fit_the_question_is_not_taken(part: Part, wrong: str) -> None:
    engine = make_engine(FakeBackend(lambda prompt, params: part))
    with pytest.raises(RunError, match=f"vllm answered with .*{wrong}"):
        asyncio.run(engine.sample(PROMPT, SamplingParams(max_tokens=4)))


def test_an_engine_that_failed_to_start_or_to_load_samples_no_more() -> None:
    backend = FakeBackend(fail=ModelError("vllm did not start: too large"))
    engine = make_engine(backend)
    with pytest.raises(ModelError, match="too large"):
        asyncio.run(engine.sample(PROMPT, SamplingParams()))
    with pytest.raises(RunError, match="too large"):
        asyncio.run(engine.sample(PROMPT, SamplingParams()))
    assert backend.events == ["start"]

    half = FakeBackend()
    engine = make_engine(half)

    async def main() -> None:
        await engine.sample(PROMPT, SamplingParams(max_tokens=1))
        half.fail = RunError("vllm: no such tensor")
        with pytest.raises(RunError, match="no such tensor"):
            await engine.load_weights(3)
        with pytest.raises(RunError, match="did not take the weights of version 3: vllm: no such tensor"):
            await engine.sample(PROMPT, SamplingParams(max_tokens=1))

    asyncio.run(main())
    assert engine.version == 0 and not half.folders[-1].exists()


# ---- in a recipe

BASE: dict[str, Any] = {
    "model": {"type": "scratch"},
    "tasks": {"type": "arithmetic"},
    "environment": {"type": "calculator"},
}


def policy_of(name: str) -> Policy:
    return Policy(make(name), TOKENIZER, torch.tensor([4, 5]), torch.device("cpu"), torch.float32, "test")


def engine_of(options: dict[str, Any], name: str = "llama", **rollout: Any) -> Any:
    policy = policy_of(name)
    component = Component(type="vllm", **options)
    section = RolloutSection(engine=component, **rollout)
    return build(ENGINES, component, "rollout.engine", policy=policy, model=policy.model, rollout=section)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.engine={type: vlm}", "rollout.engine: unknown engine 'vlm': did you mean 'vllm'"),
        ("rollout.engine={type: vllm, pyton: x}", "has no option 'pyton'; did you mean 'python'"),
        ("rollout.engine={type: vllm, context: long}", "rollout.engine.context: .* got 'long'"),
        ("rollout.engine={type: local, slots: 3}", "rollout.engine.slots: 'local' has no option 'slots'"),
    ],
)
def test_a_mistake_in_the_engine_is_found_at_load(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_recipe(load_recipe(BASE, [override]))


def test_a_run_with_vllm_does_not_claim_to_be_repeatable() -> None:
    facts = dict(derived_facts(load_recipe(BASE, ["rollout.engine={type: vllm}"])))
    assert "depends on timing" in facts["engine"]
    assert "engine" not in dict(derived_facts(load_recipe(BASE)))


def test_a_missing_vllm_says_how_to_install_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(in_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="vllm is not installed in this Python: pip install vllm .*docs/engines.md"):
        engine_of({})


def test_options_that_exclude_each_other_or_promise_too_much_are_refused() -> None:
    with pytest.raises(RecipeError, match="give one of them"):
        engine_of({"python": "python3", "address": "http://localhost:1"})
    with pytest.raises(RecipeError, match="start it with them"):
        engine_of({"address": "http://localhost:1", "args": {"enforce_eager": True}})
    with pytest.raises(ModelError, match="there is no program '/no/python'"):
        engine_of({"python": "/no/python"})
    with pytest.raises(ModelError, match="context 97 is more than the model's 96"):
        engine_of({"address": "http://localhost:1", "context": 97})
    with pytest.raises(RecipeError, match="does not record the experts .* rollout.record_routing: false"):
        engine_of({"address": "http://localhost:1"}, "mixtral")
    engine = engine_of({"address": "http://localhost:1"}, "mixtral", record_routing=False)
    assert (engine.context, engine.deterministic, engine.has_logprobs) == (96, False, True)


def test_the_recipe_decides_slots_and_arguments_and_the_policy_the_rest() -> None:
    engine = engine_of({"address": "http://localhost:1", "context": 50}, slots=3)
    arguments = engine._backend._settings.engine_arguments(Path("/m"), "w.W")
    assert arguments["max_num_seqs"] == 3 and arguments["max_model_len"] == 50 and arguments["dtype"] == "float32"
    assert arguments["logprobs_mode"] == "processed_logprobs" and arguments["generation_config"] == "vllm"
    assert engine._backend._settings.output_ids == (4, 5)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in engine._backend._settings.environment
    many = Settings(50, output_ids=tuple(range(1025)))
    assert many.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0", "the second takes no more than 1024 ids"
    assert (
        np.dtype(np.int32)
        == asyncio.run(make_engine(FakeBackend()).sample([5], SamplingParams(max_tokens=1))).ids.dtype
    )
