"""benchmarks/sampling.py: its requests, what it reckons with, its profile, and its peers' protocol and numbers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import GenerationConfig

from benchmarks import sampling, sampling_shares
from benchmarks.sampling_jobs import (
    GROUP,
    OBSERVATION,
    QUICK,
    TURNS,
    Episode,
    Job,
    fixed,
    positions_needed,
    ragged,
    ratio,
    summary,
    turns,
)
from benchmarks.sampling_peers import Peer
from benchmarks.sampling_renma import RenmaSampler, jobs_of, model_folder, occupancy, parts_of
from benchmarks.sampling_report import broken_claims, print_tables, unmasked
from benchmarks.tiny_runs import Results
from renma.errors import RunError
from tests.inference.tiny_models import byte_tokenizer, make

PEERS = Path(sampling.__file__).parent / "peers"


@pytest.fixture(scope="module")
def hf() -> ModuleType:
    """The transformers peer, imported as its script is run: with its own folder on the path."""
    sys.path.insert(0, str(PEERS))
    spec = importlib.util.spec_from_file_location("hf_sampling", PEERS / "hf_sampling.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(PEERS))
    return module


# ---- jobs


@given(st.integers(2, 60), st.integers(1, 9), st.integers(10, 400), st.integers(0, 5))
def test_ragged_lengths_cover_their_bounds_evenly(count: int, low: int, high: int, seed: int) -> None:
    job = ragged("ragged", [[1]] * count, (low, high), seed)
    lengths = sorted(episode.lengths[0] for episode in job.episodes)
    assert (lengths[0], lengths[-1]) == (low, high)
    gaps = np.diff(lengths)
    assert gaps.max() - gaps.min() <= 1
    assert job.tokens == sum(lengths)


def test_turns_are_groups_that_share_their_prompt() -> None:
    job = turns("turns", [[1, 2], [3]], (2, 5), [7, 8])
    assert [e.prompt for e in job.episodes] == [[1, 2]] * GROUP + [[3]] * GROUP
    for episode in job.episodes:
        assert len(episode.lengths) == TURNS and all(2 <= length <= 5 for length in episode.lengths)
        assert [len(o) for o in episode.observations] == [OBSERVATION] * (TURNS - 1)
        assert {token for o in episode.observations for token in o} <= {7, 8}
    assert job.longest == max(len(e.prompt) + sum(e.lengths) + 24 for e in job.episodes)


def test_positions_needed_are_first_prompts_once_and_what_each_turn_adds() -> None:
    # Turn 2 adds the last sampled token, which nobody asked to go on from, and one observed.
    first = ([[1, 2, 3], [1, 2, 3, 7, 8, 9]], [[7, 8], [5]])
    second = ([[1, 2, 3], [1, 2, 3, 4, 9]], [[4], [6]])
    assert positions_needed([first]) == 5
    assert positions_needed([first, second]) == 7
    assert positions_needed([([[1, 2, 3]], [[7]]), ([[1, 2, 4]], [[7]])]) == 4


def test_medians_and_ratios_are_of_runs_in_the_same_round() -> None:
    runs = [
        {"job": "a", "engine": engine, "round": number, "tokens": 10, "seconds": seconds}
        for engine, times in (("renma", (1.0, 2.0, 1.0)), ("hf", (4.0, 4.0, 2.0, 100.0)))
        for number, seconds in enumerate(times)
    ]
    assert ratio(runs, "a", "renma", "hf") == 2.0
    assert ratio(runs, "a", "renma", "vllm") is None
    found = summary(runs)["a"]
    assert (found["renma"]["tokens_per_second"], found["renma"]["runs"]) == (10.0, 3)
    assert found["hf"]["seconds"] == 4.0


def test_a_masked_peer_stands_beside_its_unmasked_speed() -> None:
    runs = [
        {"job": job, "engine": engine, "round": 0, "tokens": 12, "seconds": seconds}
        for job, engine, seconds in (("full-4", "hf", 2.0), ("tasks-4", "hf", 6.0), ("tasks-4", "renma", 1.0))
    ]
    assert unmasked(runs, "tasks-4") == [("hf", 6.0, 2.0)]
    assert unmasked(runs, "full-4") == []


def test_claims_that_do_not_hold_are_named() -> None:
    runs: dict[str, dict[str, Any]] = {
        "busy": {"job": "ragged", "occupancy_waiting": 0.95},
        "idle": {"job": "ragged", "occupancy_waiting": 0.5},
        "once": {"job": "turns", "computed": 10, "needed": 10, "prompts": 1},
        "twice": {"job": "turns", "computed": 11, "needed": 10, "prompts": 1},
        "near": {"job": "turns", "computed": 42, "needed": 10, "prompts": 2},
        "slow": {"columns": 262_144, "seconds": {"sampler": 2.0, "head": 8.0}},
        "small": {"columns": 320, "seconds": {"sampler": 2.0, "head": 8.0}},
        "fast": {"columns": 262_144, "seconds": {"sampler": 1.0, "head": 9.0}},
    }
    assert [claim.split(":")[0] for claim in broken_claims(runs)] == ["idle", "twice", "slow"]


def test_occupancy_is_of_the_rounds_between_two_readings() -> None:
    before = {"rounds": 10, "busy_slot_rounds": 40}
    assert occupancy(before, {"rounds": 20, "busy_slot_rounds": 70}, slots=4) == 0.75
    assert np.isnan(occupancy(before, before, slots=4))


# ---- Renma's side


def test_the_engine_runs_a_job_as_a_rollout_would() -> None:
    policy = SimpleNamespace(model=make("llama"), tokenizer=byte_tokenizer(), output_ids=torch.arange(4, 260))
    draw = np.random.default_rng(0)
    prompts = [[*range(4, 50), 60 + i] for i in range(3)]
    job = turns("turns", prompts, (1, 3), list(range(4, 260)))
    sampler = RenmaSampler(policy, slots=len(job.episodes), context=job.longest + 1)  # type: ignore[arg-type]
    for _ in range(2):  # nothing of the first run is left for the second
        answer = sampler.run(job)
        assert answer["tokens"] == job.tokens and answer["seconds"] > 0
        assert len(prompts[0]) < answer["computed"] <= answer["needed"] < answer["whole"]
    many = ragged("ragged", [[int(token)] for token in draw.integers(4, 260, 40)], (2, 20))
    answer = RenmaSampler(policy, slots=4, context=40).run(many)  # type: ignore[arg-type]
    assert answer["occupancy_waiting"] > 0.9 > 0.5 < answer["occupancy"] < answer["occupancy_waiting"]


# ---- the profile


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("aten::mm", [[2, 3], [3, 5]], 60),
        ("aten::addmm", [[5], [2, 3], [3, 5]], 60),
        ("aten::mv", [[2, 3], [3]], 12),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], 420),
        ("mkldnn::_linear_pointwise", [[4, 2, 3], [5, 3]], 240),
        ("aten::mul", [[2, 3], [3, 5]], 0),
    ],
)
def test_flops_of_a_product(name: str, shapes: list[list[int]], flops: int) -> None:
    assert sampling_shares.product_flops(name, shapes) == flops


def test_the_shares_of_a_round_add_up_and_know_the_head() -> None:
    model = make("llama")
    policy = SimpleNamespace(model=model, tokenizer=byte_tokenizer(), output_ids=None)
    parts = SimpleNamespace(policy=policy)
    sampling_shares.all_tokens, kept = (lambda policy: policy), sampling_shares.all_tokens
    try:
        found = sampling_shares.round_at(parts, True, [[5, 6], [7, 8, 9]], plain=2, profiled=3)  # type: ignore[arg-type]
    finally:
        sampling_shares.all_tokens = kept
    assert set(found["seconds"]) == set(sampling_shares.PARTS)
    assert all(found["seconds"][part] > 0 for part in (*sampling_shares.LARGE, "sampler"))
    assert sum(found["seconds"].values()) >= 0.999 * found["round_seconds"] > 0
    assert found["head_gflops"] > 0 and found["products_gflops"] > 0


def test_what_is_left_of_a_round_is_divided_as_in_the_profile() -> None:
    profile = {"products": 4.0, "head": 2.0, "attention": 2.0, "sampler": 9.0, "other operations": 6.0, "python": 2.0}
    found = sampling_shares.divided(10.0, 1.0, profile, rounds=2)
    assert found == {
        "products": 2.0,
        "head": 1.0,
        "attention": 1.0,
        "sampler": 1.0,
        "other operations": 3.75,
        "python": 1.25,
    }


def test_the_peak_is_that_of_a_large_product() -> None:
    assert sampling_shares.matmul_peak(torch.float32, size=64, seconds=0.01) > 0.01


# ---- peers


def test_a_peer_answers_jobs_and_its_own_prints_are_not_answers(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(PEERS)!r})\n"
        "from json_jobs import serve\n"
        "def start():\n"
        "    print('a library says hello')\n"
        "    return lambda episodes, allowed: {'tokens': len(episodes), 'allowed': allowed}\n"
        "serve(start)\n"
    )
    job = Job("j", [Episode([1], [2], [])] * 3, allowed=[4, 5]).written(tmp_path / "job.json")
    peer = Peer("peer", [sys.executable, script], tmp_path / "log")
    assert peer.run(job) == {"tokens": 3, "allowed": [4, 5]}
    assert peer.run(job, limited=False) == {"tokens": 3, "allowed": None}
    peer.close()
    assert "a library says hello" in (tmp_path / "log").read_text()


def test_a_peer_that_dies_is_an_error_that_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"peer ended with code 3 .*the\.log"):
        Peer("peer", [sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "the.log")


@pytest.mark.parametrize(("name", "plain"), [("llama", False), ("llama", True), ("gemma3", True), ("gpt2", False)])
def test_the_transformers_peer_records_the_log_probabilities_of_what_it_draws(
    name: str, plain: bool, hf: ModuleType
) -> None:
    """Over turns with a kept cache, rows of different lengths, and a token set, against one forward of each row."""
    torch.manual_seed(0)
    model = make(name).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    draw = np.random.default_rng(1)
    sequences = [[9, 8, 7, *draw.integers(4, 260, size).tolist()] for size in (1, 3, 2)]
    allowed = torch.full((260,), -torch.inf)
    allowed[4:100] = 0.0
    turn_lengths = ([2, 1, 3],) if name == "gemma3" else ([2, 1, 3], [1, 3, 2])
    with torch.no_grad():
        batch = hf.Batch(model, sequences, plain)
        for lengths in turn_lengths:
            made, logprobs = batch.generate(lengths, allowed)
            for row, length in enumerate(lengths):
                drawn = made[row, :length].tolist()
                logits = model(torch.tensor([sequences[row] + drawn]), use_cache=False).logits[0] + allowed
                wanted = logits.log_softmax(-1)[len(sequences[row]) - 1 : -1].gather(1, torch.tensor(drawn)[:, None])
                torch.testing.assert_close(logprobs[row, :length], wanted[:, 0], atol=1e-4, rtol=0)
                assert set(drawn) <= set(range(4, 100)) and not logprobs[row, length:].any()
                sequences[row] = [*sequences[row], *drawn, 5, 6]
            batch.observe([[5, 6]] * 3)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5))
def test_what_prompts_have_in_common_leaves_each_something(hf: ModuleType, prompts: list[list[int]]) -> None:
    length = hf.common_length(prompts)
    shortest = min(map(len, prompts))
    assert 0 <= length < shortest
    assert all(prompt[:length] == prompts[0][:length] for prompt in prompts)
    assert length == shortest - 1 or len({prompt[length] for prompt in prompts}) > 1


# ---- the whole, on the quickstart's policy


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart's policy, made smaller and from less text."""
    size = ("model.context=512", "model.layers=1", "model.hidden=32", "model.heads=2")
    monkeypatch.setattr("benchmarks.sampling_renma.SCRATCH", size)
    monkeypatch.setattr("renma.training.setup.TRANSCRIPTS", 30)


@pytest.mark.usefixtures("small")
def test_a_quick_run_fills_the_table_and_is_not_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    command = ["sampling", "--out", str(out), "--quick", "--recipes", "quickstart", "--engines", "renma", "--threads"]
    monkeypatch.setattr(sys, "argv", [*command, "1", "--rounds", "2"])
    sampling.main()
    runs = json.loads(out.read_text())
    assert len(runs) == 2 * len(sampling.scenario_names(QUICK, "quickstart"))
    sampling.main()
    assert json.loads(out.read_text()) == runs
    console = Console(width=200, record=True)
    print_tables(Results(out).runs, console)
    text = console.export_text()
    assert "full-16" in text and "ragged" in text and "turns" in text


@pytest.mark.usefixtures("small")
def test_jobs_fit_the_policy_and_its_folder_opens(tmp_path: Path) -> None:
    parts = parts_of("quickstart")
    jobs = jobs_of(parts, QUICK)
    assert [job.name for job in jobs] == sampling.scenario_names(QUICK, "quickstart")
    assert max(job.longest for job in jobs) < parts.policy.model.config.max_position_embeddings
    folder = model_folder(parts, tmp_path)
    assert (folder / "config.json").exists() and model_folder(parts, tmp_path) == folder
    assert fixed("one", [[1, 2]], 3).tokens == 3
