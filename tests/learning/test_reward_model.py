"""Reward models: where they read, what they minimise, what they learn, and that they come back from disk unchanged."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from renma.errors import DataError, ModelError
from renma.learning.reward_learner import RewardLearner, bradley_terry, step_loss
from renma.learning.reward_model import Form, RewardModel, reading
from renma.models.policy import Policy
from renma.models.scratch import build_llama, llama_config, train_tokenizer
from renma.preferences.base import judged, labels_of, pair
from renma.recipe import LearnerSection, ScratchModel
from renma.types import Group, Trajectory
from tests.learning.tiny import VOCABULARY, make_model, make_trajectory

TEXT = ["Question: 1 + 2 =\nAnswer: 3\n"]


def tokenizer(text: Sequence[str] = TEXT) -> PreTrainedTokenizerFast:
    return train_tokenizer(text, 280)


def reward_model(
    form: Form = "outcome", *, kind: str = "llama", random_head: bool = False, **options: Any
) -> RewardModel:
    model = RewardModel(make_model(kind), tokenizer(), form, **options)
    if random_head:
        torch.manual_seed(3)
        torch.nn.init.normal_(model.head.weight, std=0.3)
        torch.nn.init.constant_(model.head.bias, 0.2)
    return model


READY = {form: reward_model(form, random_head=True) for form in get_args(Form)}


def episode(seed: int, *, turns: int = 2, rewritten: bool = False) -> Trajectory:
    """Turns whose prompts extend what came before, or (rewritten) begin anew each time."""
    rng = np.random.default_rng(seed)
    context: list[int] = []
    steps = []
    for _ in range(turns):
        prompt = ([] if rewritten else context) + rng.integers(0, VOCABULARY, int(rng.integers(1, 5))).tolist()
        action = rng.integers(0, VOCABULARY, int(rng.integers(1, 5))).tolist()
        context = prompt + action
        steps.append((prompt, action))
    return make_trajectory(steps)


def read_plainly(model: RewardModel, ids: Sequence[int]) -> float:
    """The score at the last of the ids, the plain way: the trunk on them alone."""
    hidden = model.trunk.inner(input_ids=torch.tensor([list(ids)])).last_hidden_state[0, -1]
    return float(hidden @ model.head.weight[0] + model.head.bias[0])


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("rewritten", [False, True])
def test_scores_are_read_at_the_last_token_of_actions(kind: str, rewritten: bool) -> None:
    episodes = [episode(seed, turns=3, rewritten=rewritten) for seed in range(4)]
    outcome, process = (reward_model(form, kind=kind, random_head=True) for form in ("outcome", "process"))
    with torch.no_grad():
        for one, [score], steps in zip(episodes, outcome.judge(episodes), process.judge(episodes), strict=True):
            ends = [[*step.prompt_ids.tolist(), *step.action_ids.tolist()] for step in one.steps]
            assert score == pytest.approx(read_plainly(outcome, ends[-1]), abs=1e-5)
            wanted = [1 / (1 + np.exp(-read_plainly(process, ids))) for ids in ends]
            assert steps == pytest.approx(wanted, abs=1e-5)


def test_a_step_without_a_sampled_token_has_no_score() -> None:
    one = make_trajectory([([1, 2], [3]), ([1, 2, 3, 4], []), ([1, 2, 3, 4], [5])])
    [scores] = reward_model("process", random_head=True).judge([one])
    assert scores[1] is None and None not in (scores[0], scores[2])
    nothing = make_trajectory([])
    assert reward_model("process").judge([nothing]) == [[]]
    assert reward_model("outcome").judge([nothing]) == [[None]]
    ends_silent = make_trajectory([([1, 2], [3]), ([1, 2, 3, 4], [])])
    model = reward_model("outcome", random_head=True)
    with torch.no_grad():
        assert model.judge([ends_silent])[0][0] == pytest.approx(read_plainly(model, [1, 2, 3]), abs=1e-5)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), st.randoms(use_true_random=False))
def test_a_score_does_not_depend_on_what_is_scored_beside_it(seeds: list[int], rng: Any) -> None:
    for model in (READY["outcome"], READY["process"]):
        together = model.judge([episode(seed) for seed in seeds])
        order = rng.sample(range(len(seeds)), len(seeds))
        for place, scores in zip(order, model.judge([episode(seeds[place]) for place in order]), strict=True):
            assert scores == pytest.approx(together[place], abs=3e-6)
            assert model.judge([episode(seeds[place])])[0] == pytest.approx(together[place], abs=3e-6)


numbers = st.floats(-30, 30)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6))
def test_bradley_terry_and_its_gradient_against_numpy(scores: list[tuple[float, float]]) -> None:
    table = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    loss = bradley_terry(table[:, 0], table[:, 1])
    delta = np.array(scores)[:, 0] - np.array(scores)[:, 1]
    assert loss.detach().numpy() == pytest.approx(-np.log(1 / (1 + np.exp(-delta))), abs=1e-9)
    loss.sum().backward()
    slope = -1 / (1 + np.exp(delta))
    assert table.grad is not None
    assert table.grad.numpy() == pytest.approx(np.stack([slope, -slope], 1), abs=1e-9)


@given(st.lists(st.tuples(numbers, st.none() | st.floats(0, 1)), min_size=1, max_size=6))
def test_the_step_loss_against_numpy(steps: list[tuple[float, float | None]]) -> None:
    scores = torch.tensor([score for score, _ in steps], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([np.nan if label is None else label for _, label in steps], dtype=torch.float64)
    loss = step_loss(scores, labels)
    loss.sum().backward()
    assert scores.grad is not None
    for (score, label), value, slope in zip(steps, loss.tolist(), scores.grad.tolist(), strict=True):
        p = 1 / (1 + np.exp(-score))
        wanted = 0.0 if label is None else label * np.logaddexp(0, -score) + (1 - label) * np.logaddexp(0, score)
        assert value == pytest.approx(wanted, abs=1e-9)
        assert slope == pytest.approx(0.0 if label is None else p - label, abs=1e-9)


def plain_loss(model: RewardModel, groups: Sequence[Group]) -> torch.Tensor:
    """The objective from whole rows run alone, differentiable."""

    def score(ids: Sequence[int]) -> torch.Tensor:
        hidden = model.trunk.inner(input_ids=torch.tensor([list(ids)])).last_hidden_state[0, -1]
        return hidden @ model.head.weight[0] + model.head.bias[0]

    charges = []
    for group in groups:
        ends = [[[*s.prompt_ids.tolist(), *s.action_ids.tolist()] for s in t.steps] for t in group.trajectories]
        if model.form == "outcome":
            charges.append(-torch.nn.functional.logsigmoid(score(ends[0][-1]) - score(ends[1][-1])))
            continue
        for rows, trajectory in zip(ends, group.trajectories, strict=True):
            for ids, label in zip(rows, labels_of(trajectory), strict=True):
                if label is not None:
                    p = torch.sigmoid(score(ids))
                    charges.append(-(label * torch.log(p) + (1 - label) * torch.log(1 - p)))
    return torch.stack(charges).mean()


def batch(form: Form, count: int = 4) -> list[Group]:
    if form == "outcome":
        return [pair(episode(2 * seed), episode(2 * seed + 1, turns=3)) for seed in range(count)]
    labels: list[list[float | None]] = [[1.0, None], [0.25, 0.75], [None, 0.0], [1.0, 1.0]]
    return [Group(one.task, (judged(one, labels[seed % 4]),)) for seed in range(count) for one in [episode(seed)]]


class Stopped(RewardLearner):
    """Keeps the gradients instead of stepping."""

    def _apply(self, numbers: Any) -> None:
        self.gradients = {n: m.grad.clone() for n, m in self.optimizer.masters.items() if m.grad is not None}
        self.optimizer.clear()


@pytest.mark.parametrize("form", ["outcome", "process"])
@pytest.mark.parametrize("max_positions", [4096, 16, 1])
def test_the_gradient_is_that_of_separate_rows_however_a_batch_is_cut(form: Form, max_positions: int) -> None:
    model = reward_model(form, kind="llama_tied", random_head=True, max_positions=max_positions)
    groups = batch(form)
    learner = Stopped(model, LearnerSection())
    stats = learner.update(groups)
    wanted = plain_loss(model, groups)
    wanted.backward()
    assert stats["loss"] == pytest.approx(float(wanted.detach()), abs=1e-5)
    assert learner.gradients.keys() == {n for n, p in model.named_parameters().items() if p.grad is not None}
    for name, gradient in learner.gradients.items():
        plain = model.named_parameters()[name].grad
        torch.testing.assert_close(gradient, plain, atol=2e-5, rtol=1e-4, msg=name)
    assert learner.measure(groups)["loss"] == pytest.approx(stats["loss"], abs=1e-5)


@pytest.mark.parametrize("form", ["outcome", "process"])
def test_the_gradient_against_finite_differences(form: Form) -> None:
    model = reward_model(form, random_head=True)
    groups = batch(form, 2)
    learner = Stopped(model, LearnerSection())
    learner.update(groups)
    exact = copy.deepcopy(model)
    exact.model.double(), exact.head.double()
    for name in ("head.weight", "trunk.layers.0.mlp.down_proj.weight", "trunk.embed_tokens.weight"):
        parameter, gradient = exact.named_parameters()[name], learner.gradients[name]
        place = int(gradient.abs().argmax())
        with torch.no_grad():
            values = []
            for shift in (1e-3, -1e-3):  # parts of the model compute in float32 whatever its type
                parameter.view(-1)[place] += shift
                values.append(float(plain_loss(exact, groups)))
                parameter.view(-1)[place] -= shift
        assert float(gradient.view(-1)[place]) == pytest.approx((values[0] - values[1]) / 2e-3, rel=0.01, abs=1e-4)


def test_groups_that_say_nothing_are_refused() -> None:
    outcome = RewardLearner(reward_model("outcome"), LearnerSection())
    with pytest.raises(DataError, match="two trajectories with different returns"):
        outcome.update([Group(episode(0).task, (episode(0), episode(1)))])
    with pytest.raises(DataError, match="two trajectories"):
        outcome.update([Group(episode(0).task, (episode(0),))])
    process = RewardLearner(reward_model("process"), LearnerSection())
    with pytest.raises(DataError, match="no step with a label"):
        process.update([Group(episode(0).task, (episode(0),))])
    with pytest.raises(DataError, match="between 0 and 1"):
        process.update([Group(episode(0).task, (judged(episode(0), [2.0, None]),))])


def policy(seed: int = 0) -> Policy:
    own = tokenizer()
    section = ScratchModel(layers=2, hidden=32, heads=2, feed_forward=64, vocabulary=280, context=64)
    model = build_llama(llama_config(section, own), seed)
    return Policy(model, own, None, torch.device("cpu"), torch.float32, "test")


LIKED = 17


def written(rng: np.random.Generator, prompt: list[int]) -> Trajectory:
    """Eight tokens after the prompt, of six symbols."""
    return make_trajectory([(prompt, rng.integers(LIKED - 3, LIKED + 3, 8).tolist())])


def liked_pairs(seed: int, count: int) -> list[Group]:
    """Pairs in which the chosen has more of the liked token; both answer one prompt."""
    rng = np.random.default_rng(seed)
    found: list[Group] = []
    while len(found) < count:
        prompt = rng.integers(40, 60, 3).tolist()
        two = [written(rng, prompt) for _ in range(2)]
        counts = [int((t.steps[0].action_ids == LIKED).sum()) for t in two]
        if counts[0] != counts[1]:
            found.append(pair(*(two if counts[0] > counts[1] else reversed(two))))
    return found


def test_it_learns_that_more_of_a_token_is_better() -> None:
    started = time.perf_counter()
    model = RewardModel.start(policy(), "outcome")
    learner = RewardLearner(model, LearnerSection(learning_rate=3e-3), total_steps=40)
    training, unseen = liked_pairs(1, 320), liked_pairs(2, 100)
    before = learner.measure(unseen)
    assert before["accuracy"] == 0.5 and before["loss"] == pytest.approx(np.log(2)), "a new head says nothing"
    for step in range(40):
        learner.update([training[(step * 32 + i) % len(training)] for i in range(32)])
    after = learner.measure(unseen)
    assert after["accuracy"] > 0.9, after
    assert after["margin"] > 1
    assert time.perf_counter() - started < 60
    learner.centre(training)
    scores = [score for group in training for [score] in model.judge(group.trajectories)]
    assert np.mean(np.array(scores, np.float64)) == pytest.approx(0, abs=1e-4)
    assert learner.measure(unseen)["loss"] == pytest.approx(after["loss"], abs=1e-4), "differences stay"


def test_the_process_form_learns_which_steps_are_good() -> None:
    def labelled(seed: int, count: int) -> list[Group]:
        rng = np.random.default_rng(seed)
        groups = []
        for _ in range(count):
            prompt = rng.integers(40, 60, 3).tolist()
            first, second = rng.integers(LIKED, LIKED + 2, 2).tolist()
            one = make_trajectory([(prompt, [first]), ([*prompt, first, 50], [second])])
            groups.append(Group(one.task, (judged(one, [float(token == LIKED) for token in (first, second)]),)))
        return groups

    model = RewardModel.start(policy(), "process")
    learner = RewardLearner(model, LearnerSection(learning_rate=3e-3))
    training, unseen = labelled(1, 256), labelled(2, 64)
    for step in range(16):
        learner.update([training[(step * 32 + i) % len(training)] for i in range(32)])
    measured = learner.measure(unseen)
    assert measured["accuracy"] > 0.95
    assert measured["score_good"] > 0.8 > 0.2 > measured["score_bad"]


def test_saved_and_loaded_it_scores_the_same_and_the_policy_is_left_alone(tmp_path: Path) -> None:
    own = policy()
    weights = {name: value.clone() for name, value in own.model.state_dict().items()}
    model = RewardModel.start(own, "outcome")
    learner = RewardLearner(model, LearnerSection(learning_rate=1e-2))
    learner.update(liked_pairs(1, 8))
    assert all(torch.equal(value, weights[name]) for name, value in own.model.state_dict().items())
    folder = tmp_path / "reward_model"
    model.save(folder, "a test")
    model.save(folder, "again: it replaces what it saved")
    assert not list(folder.glob("*.bin")) and not list(folder.glob("*.pt"))
    loaded = RewardModel.load(folder, dtype=torch.float32, device=torch.device("cpu"))
    one = liked_pairs(3, 4)
    episodes = [t for group in one for t in group.trajectories]
    assert loaded.judge(episodes) == model.judge(episodes)
    assert loaded.form == "outcome"
    loaded.check_tokenizer(own.tokenizer)
    with pytest.raises(ModelError, match="another tokenizer"):
        loaded.check_tokenizer(tokenizer(["Other words make other merges. " * 3]))


def test_a_folder_that_holds_no_reward_model_is_named(tmp_path: Path) -> None:
    def load(folder: Path) -> RewardModel:
        return RewardModel.load(folder, dtype=torch.float32, device=torch.device("cpu"))

    with pytest.raises(ModelError, match="holds no reward model"):
        load(tmp_path)
    model = RewardModel.start(policy(), "process")
    model.save(tmp_path / "it")
    tokenizer(["Xylophones: 9 of 8."]).save_pretrained(tmp_path / "it")
    with pytest.raises(ModelError, match="is not the one its reward model was trained with"):
        load(tmp_path / "it")
    model.save(tmp_path / "it")
    (tmp_path / "it" / "score_head.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match="cannot be used"):
        load(tmp_path / "it")


def test_readings_cover_exactly_the_sampled_steps() -> None:
    one = episode(5, turns=3)
    assert reading(one, "process").steps.tolist() == [0, 1, 2]
    assert reading(one, "outcome").steps.tolist() == [2]
    assert len(reading(one, "process").rows) == 1
    assert len(reading(episode(5, turns=3, rewritten=True), "process").rows) == 3
