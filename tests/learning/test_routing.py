"""Router replay: the learner sends a token to the experts it went to when it was sampled."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from renma.errors import ModelError
from renma.inference import SamplingParams
from renma.inference.local import LocalEngine
from renma.learning.forward import TreeModel
from renma.learning.learner import Learner
from renma.learning.losses import ppo_clip
from renma.learning.rows import Row, rows_of
from renma.learning.scorer import Scorer
from renma.learning.tree import PackCost, pack
from renma.models.experts import Routers
from renma.recipe import LearnerSection
from renma.rollout.store import TrajectoryStore, read_trajectories
from renma.rollout.trajectory_rows import SCHEMA, from_rows, to_table
from renma.types import Action, Group, Routing, Step, Task, Trajectory
from tests.inference.tiny_mixtures import CHOSEN, EXPERTS, KINDS, LAYERS, experts_used, make, plain_routing
from tests.inference.tiny_models import byte_tokenizer, ids
from tests.learning.tiny import make_model, make_row, make_trajectory, random_rows

OUTPUT = torch.tensor(sorted(ids("abcdefghijklmnop")))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def sampled(model: Any, tokenizer: PreTrainedTokenizerFast) -> list[Trajectory]:
    """A group of three episodes of two turns from fewer slots, every step with its routes."""
    engine = LocalEngine(model, tokenizer, slots=2, output_ids=OUTPUT, record_routing=True)

    async def episode(member: int) -> Trajectory:
        prompt, steps = ids("they all begin like this "), []
        for turn in range(2):
            sample = await engine.sample(
                prompt, SamplingParams(max_tokens=6 + member, seed=9 * member + turn), key=(member, turn)
            )
            given = np.array(prompt, np.int32), sample.ids, sample.logprobs, sample.versions
            steps.append(Step(*given, Action(""), routing=sample.routing))
            prompt = [*prompt, *sample.ids.tolist(), *ids(" and ")]
        return Trajectory(Task("t", "?"), member, tuple(steps), "done", "answer")

    async def all_of() -> list[Trajectory]:
        return list(await asyncio.gather(*map(episode, range(3))))

    found = asyncio.run(all_of())
    assert engine.stats["reused_positions"] > 0
    return found


def rows_from(trajectories: list[Trajectory]) -> list[Row]:
    advantages = (np.full(t.sampled_tokens, (-1.0) ** t.member, np.float32) for t in trajectories)
    return [row for i, (t, a) in enumerate(zip(trajectories, advantages, strict=True)) for row in rows_of(t, i, a)]


def router_weights(model: Any) -> list[torch.nn.Parameter]:
    found = [p for name, p in model.named_parameters() if name.endswith((".gate.weight", ".router.weight"))]
    assert len(found) == LAYERS
    return found


def near_ties(model: Any) -> Any:
    """The model with routers whose logits hardly differ: the last bits decide where a token goes."""
    with torch.no_grad():
        for weight in router_weights(model):
            weight.copy_(weight.mean(0) + 1e-5 * (weight - weight.mean(0)))
        for name, parameter in model.named_parameters():
            if name.endswith(".router.bias"):
                parameter.zero_()
    return model


@contextmanager
def other_rounding(model: Any) -> Iterator[None]:
    """Routers whose logits are off by a few millionths: what two forwards of one policy in low precision do."""
    generator = torch.Generator().manual_seed(0)
    routers = router_weights(model)
    kept = [router.detach().clone() for router in routers]
    with torch.no_grad():
        for router in routers:
            router.add_(1e-5 * torch.randn(router.shape, generator=generator))
        try:
            yield
        finally:
            for router, before in zip(routers, kept, strict=True):
                router.copy_(before)


def ratio_error(scorer: Scorer, rows: list[Row]) -> float:
    found = np.concatenate(scorer.logprobs(rows)).astype(np.float64)
    return float(np.abs(np.exp(found - np.concatenate([row.logprobs[row.trained] for row in rows])) - 1).max())


@pytest.mark.parametrize("kind", KINDS)
def test_the_ratio_of_one_gradient_step_is_one(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = make(kind)
    rows = rows_from(sampled(model, tokenizer))
    assert len(rows) == 3
    learner = Learner(model, LearnerSection(learning_rate=1e-2), output_ids=OUTPUT)
    assert ratio_error(learner.scorer, rows) <= 1e-6
    router = router_weights(model)[0]
    before = router.detach().clone()
    numbers = learner.update(rows, loss=ppo_clip(), old_logprobs="behaviour")
    assert numbers["mismatch_max"] <= 1e-6
    assert not torch.equal(before, router)  # the choice is imposed; the weights are the router's, and it learns
    assert ratio_error(learner.scorer, rows) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_near_ties_flip_experts_without_replay_and_not_with_it(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = near_ties(make(kind))
    rows = rows_from(sampled(model, tokenizer))
    scorer = Scorer(model, output_ids=OUTPUT)
    [tree] = pack(rows, 4096)
    assert tree.routing is not None
    assert (tree.routing >= 0).all()

    def run(replays: bool) -> tuple[Routing, float]:
        scorer.tree.replays_routing = replays
        with other_rounding(model), experts_used(model) as used:
            error = ratio_error(scorer, rows)
        return np.stack([layer.numpy() for layer in used], 1), error

    used, replayed = run(True)
    np.testing.assert_array_equal(used, tree.routing)
    used, routed_anew = run(False)
    flipped = (np.sort(used, -1) != np.sort(tree.routing, -1)).any(-1)
    assert flipped.mean() > 0.1
    assert replayed < 1e-4
    assert routed_anew > 100 * replayed


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_gradients_are_those_of_the_same_experts_chosen_freely(kind: str) -> None:
    """Recorded routes that are the model's own change nothing, whatever order the experts were written down in."""
    model = make(kind)
    rows = [dataclasses.replace(row, group=-1) for row in random_rows(3, symbols=9)]
    routed = [dataclasses.replace(row, routing=plain_routing(model, row.ids.tolist())) for row in rows]
    mixed = [dataclasses.replace(row, routing=row.routing[..., ::-1]) for row in routed if row.routing is not None]
    half = [dataclasses.replace(row, routing=plain_routing(model, row.ids.tolist())) for row in rows]
    for number, row in enumerate(half):
        assert row.routing is not None
        row.routing[number % 3 :: 2] = -1  # what is not recorded routes itself

    def gradient(some: list[Row]) -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        tree = TreeModel(model)
        tree.begin()
        for part in pack(some, 64, PackCost()):
            (tree.logprobs(part)[0] * torch.from_numpy(part.token % 3 - 1.0)).sum().backward()
        tree.finish()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    wanted = gradient(rows)
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in router_weights(model))
    for some in (mixed, half):
        got = gradient(some)
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))


def test_imposed_experts_are_used_whatever_the_router_prefers() -> None:
    model = make("mixtral")
    rng = np.random.default_rng(0)
    row = random_rows(5, count=1, low=12, high=13)[0]
    routing = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(len(row) * LAYERS)]).astype(np.int16)
    row = dataclasses.replace(row, routing=routing.reshape(len(row), LAYERS, CHOSEN))
    with experts_used(model) as used:
        Scorer(model).logprobs([row])
    # The check's own two forwards come first, and route themselves.
    got = np.stack([layer.numpy() for layer in used[-LAYERS:]], 1)
    np.testing.assert_array_equal(got, routing.reshape(len(row), LAYERS, CHOSEN)[: len(got)])
    assert (got != plain_routing(model, row.ids.tolist())[: len(got)]).any()


def route(*experts: int) -> Routing:
    """[T, 1, 1], one expert a position."""
    return np.array(experts, np.int16)[:, None, None]


def test_a_row_takes_each_position_from_the_first_step_that_recorded_it() -> None:
    trajectory = make_trajectory([([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([9], [8])])
    routes = route(10, 11, 12, -1), route(20, 21, 22, 23, 24, -1), None
    steps = tuple(dataclasses.replace(s, routing=r) for s, r in zip(trajectory.steps, routes, strict=True))
    first, second = rows_of(dataclasses.replace(trajectory, steps=steps), 0)
    assert first.routing is not None
    assert first.routing[:, 0, 0].tolist() == [10, 11, 12, 23, 24, -1]
    assert first.routing.dtype == np.int16
    assert second.routing is None
    with pytest.raises(ValueError, match="2 \\+ 2 tokens has 3 routes"):
        rows_of(dataclasses.replace(trajectory, steps=(dataclasses.replace(steps[0], routing=route(1, 2, 3)),)), 0)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(5, 60))
def test_each_node_has_a_route_that_was_recorded_for_it(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        dataclasses.replace(row, routing=rng.integers(-1, 7, (len(row), 1, 1)).astype(np.int16) if number % 3 else None)
        for number, row in enumerate(random_rows(seed))
    ]
    for tree in pack(rows, most):
        routes: dict[tuple[int, ...], set[int]] = {}
        for number in sorted(set(tree.rows.tolist())):
            routing = rows[number].routing
            for end in range(1, int(np.flatnonzero(rows[number].trained)[-1]) + 1):
                recorded = -1 if routing is None else int(routing[end - 1, 0, 0])
                routes.setdefault(tuple(rows[number].ids[:end].tolist()), set()).add(recorded)
        if tree.routing is None:
            assert all(rows[number].routing is None for number in tree.rows)
            continue
        assert tree.routing.shape == (tree.positions, 1, 1)
        prefixes: list[tuple[int, ...]] = []
        for node in range(tree.positions):
            parent = int(tree.parents[node])
            prefixes.append((*(prefixes[parent] if parent >= 0 else ()), int(tree.ids[node])))
            known = routes[prefixes[-1]] - {-1} or {-1}
            assert int(tree.routing[node, 0, 0]) in known


def test_of_rows_that_share_a_node_the_first_counts() -> None:
    one = dataclasses.replace(make_row([1, 2, 3, 4], [0, 0, 1, 1]), routing=route(0, -1, 2, -1))
    two = dataclasses.replace(make_row([1, 2, 5, 4], [0, 0, 1, 1]), routing=route(7, 8, 9, -1))
    [tree] = pack([two, one], 64, PackCost(quadratic=0))
    assert tree.ids.tolist() == [1, 2, 3, 5]  # in the order of their ids: `one` is first in the pack
    assert tree.routing is not None
    assert tree.routing[:, 0, 0].tolist() == [0, 8, 2, 9]


@pytest.mark.parametrize(
    ("kind", "routing", "message"),
    [
        ("mixtral", np.zeros((4, LAYERS + 1, CHOSEN), np.int16), "3 layers, 2 experts a token.*this model's .2 layers"),
        ("mixtral", np.full((4, LAYERS, CHOSEN), EXPERTS, np.int16), "the highest 4"),
        ("llama", np.zeros((4, LAYERS, CHOSEN), np.int16), "LlamaModel has no experts"),
    ],
)
def test_routes_of_another_model_are_refused_unless_they_are_not_replayed(
    kind: str, routing: Routing, message: str
) -> None:
    scorer = Scorer(make_model(kind))
    row = dataclasses.replace(make_row([1, 2, 3, 4], [0, 1, 1, 1]), routing=routing)
    with pytest.raises(ModelError, match=message):
        scorer.logprobs([row])
    assert not any(module._forward_hooks for module in scorer.model.modules())
    scorer.tree.replays_routing = False
    own = dataclasses.replace(row, routing=None)
    np.testing.assert_array_equal(scorer.logprobs([row])[0], scorer.logprobs([own])[0])


def test_imposing_on_another_number_of_positions_is_a_fault() -> None:
    model = make("mixtral")
    routers = Routers.of(model)
    assert routers is not None
    imposed = routers.imposing(torch.zeros(3, LAYERS, CHOSEN, dtype=torch.int16))
    with pytest.raises(RuntimeError, match="ran on 4 positions, with routes for 3"), imposed:
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))


def test_routes_are_stored_and_read_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    trajectory = make_trajectory([([1, 2], [3]), ([4], [5, 6])])
    first, second = trajectory.steps
    routing = rng.integers(-1, 128, (3, 5, 4)).astype(np.int16)
    stored = dataclasses.replace(trajectory, steps=(dataclasses.replace(first, routing=routing), second))
    with TrajectoryStore(tmp_path) as store:
        store.append(1, [Group(stored.task, (stored,))])
    [found] = read_trajectories(tmp_path)
    assert found.steps[0].routing is not None
    assert found.steps[0].routing.dtype == np.int16
    np.testing.assert_array_equal(found.steps[0].routing, routing)
    assert found.steps[1].routing is None


def test_files_from_before_routes_were_stored_are_read() -> None:
    trajectory = make_trajectory([([1, 2], [3])])
    table: pa.Table = to_table(0, [Group(trajectory.task, (trajectory,))], None, "train")
    older = table.drop_columns([name for name in SCHEMA.names if name.startswith("routing")])
    assert from_rows(older.to_pylist()).trajectory.steps[0].routing is None
