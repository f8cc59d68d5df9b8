"""The critic: its values and gradients are those of the rows apart, and nothing without a target moves it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.errors import RecipeError, RunError
from renma.learning.critic import Critic, critic_settings
from renma.learning.learner import Learner
from renma.learning.lora import apply_lora
from renma.learning.losses import reinforce
from renma.learning.rows import Row, rows_of
from renma.learning.value_head import ValueHead, explained_variance, value_loss
from renma.recipe import LearnerSection, LoraSettings
from renma.types import Group
from tests.learning.tiny import make_model, make_row, make_trajectory, random_rows, separate_logprobs


def make_critic(kind: str = "llama", model: Any = None, **options: Any) -> Critic:
    own = ("trunk", "clip", "coefficient", "detach", "total_steps", "seed")
    more = {key: options.pop(key) for key in own if key in options}
    section = LearnerSection(**{"learning_rate": 1e-2, **options})
    critic = Critic(make_model(kind) if model is None else model, section, **more)
    with torch.no_grad():  # values worth comparing
        critic.head.weight.mul_(50)
        critic.head.bias.fill_(0.3)
    return critic


def parameters(critic: Critic) -> dict[str, torch.Tensor]:
    named = {f"{part}.{n}": p for part, o in critic.optimizers.items() for n, p in o.parameters.items()}
    return {name: p.detach().clone() for name, p in named.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


def separate_values(inner: Any, head: Any, row: Row) -> torch.Tensor:
    """V before each trained token the plain way: the inner model on the row alone. Differentiable."""
    hidden = inner(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).last_hidden_state[0]
    values = hidden @ head.weight[0].to(hidden.dtype) + head.bias.to(hidden.dtype)
    return values[torch.from_numpy(np.flatnonzero(row.trained) - 1)]


def aims(rows: list[Row], seed: int, share: float = 0.6) -> tuple[list[Any], list[Any]]:
    """Targets for a share of the trained tokens, and old values for all."""
    rng = np.random.default_rng(seed)
    sizes = [int(row.trained.sum()) for row in rows]
    targets = [np.where(rng.random(n) < share, rng.normal(size=n), np.nan).astype(np.float32) for n in sizes]
    targets[0][0] = 0.5
    return targets, [rng.normal(size=n).astype(np.float32) for n in sizes]


# Values


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen3", "gemma3", "mixtral"])
@pytest.mark.parametrize("trunk", ["separate", "shared"])
def test_values_are_those_of_the_rows_apart(kind: str, trunk: Any) -> None:
    rows = random_rows(1)
    critic = make_critic(kind, trunk=trunk, max_positions=20)
    inner, head = copy.deepcopy(critic.trunk.inner), copy.deepcopy(critic.head)
    if kind != "mixtral":  # whose experts know no float64
        inner, head = inner.double(), head.double()
    with torch.no_grad():
        for row, values in zip(rows, critic.values(rows), strict=True):
            assert values.dtype == np.float32
            assert values == pytest.approx(separate_values(inner, head, row).numpy(), abs=1e-5)
    assert critic.values([]) == []


def test_the_first_values_are_close_to_zero_and_repeatable() -> None:
    rows = random_rows(1)
    first, again = (Critic(make_model(), LearnerSection()) for _ in range(2))
    values = np.concatenate(first.values(rows))
    assert 0 < np.abs(values).max() < 0.1
    assert np.array_equal(values, np.concatenate(again.values(rows)))
    assert not torch.equal(first.head.weight, ValueHead(32, seed=1).weight)


def test_a_copied_trunk_leaves_the_policy_alone() -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    critic = make_critic(model=model)
    rows = random_rows(0)
    critic.update(rows, *aims(rows, 0))
    assert same(before, model.state_dict())
    assert not torch.equal(critic.trunk.embedding.weight, model.get_input_embeddings().weight)


def test_a_copied_lora_trunk_copies_the_adapters_and_shares_what_is_frozen() -> None:
    model = apply_lora(make_model(), LoraSettings(rank=2))
    before = copy.deepcopy(model.state_dict())
    critic = make_critic(model=model)
    rows = random_rows(0)
    critic.update(rows, *aims(rows, 0))
    assert same(before, model.state_dict())
    assert critic.trunk.embedding.weight is model.get_input_embeddings().weight
    trained = critic.optimizers["trunk"].parameters
    assert trained and all("lora" in name for name in trained)
    assert any(bool((p != 0).any()) for name, p in trained.items() if "lora_B" in name)


def test_bfloat16_keeps_the_head_and_the_masters_in_float32() -> None:
    model = make_model().to(torch.bfloat16)
    critic = make_critic(model=model)
    rows = random_rows(0)
    critic.update(rows, *aims(rows, 0))
    assert critic.head.weight.dtype == torch.float32
    assert critic.trunk.embedding.weight.dtype == torch.bfloat16
    assert all(master.dtype == torch.float32 for master in critic.optimizers["trunk"].masters.values())
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_a_step_is_valued_at_its_last_prompt_token_and_its_end_at_the_next_prompt() -> None:
    task_turns = [([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6, 7], [8])]
    done = make_trajectory(task_turns)
    cut = make_trajectory(task_turns, status="truncated", stop_reason="step_limit")
    prompted = replace(cut, next_prompt_ids=np.array([9, 2, 3], np.int32))
    failed = make_trajectory(task_turns, status="failed", stop_reason="time")
    group = Group(done.task, (done, failed, cut, prompted))
    rows = [row for i, t in enumerate(group.trainable) for row in rows_of(t, i)]
    critic = make_critic()
    values, final = critic.state_values([group, Group(done.task, (done,))], rows)

    def at_end(ids: list[int]) -> float:
        return float(critic.values([make_row([*ids, 3], [*[0] * len(ids), 1])])[0][0])

    assert values[0] == pytest.approx(
        [at_end([1, 2, 3]), at_end([1, 2, 3, 4]), at_end([1, 2, 3, 4, 5, 6, 7])], abs=1e-5
    )
    assert final[0] == pytest.approx([0, at_end([1, 2, 3, 4, 5, 6, 7, 8]), at_end([9, 2, 3])], abs=1e-5)
    assert final[1] == [0.0] and len(values) == len(rows)


def test_a_next_prompt_longer_than_the_model_is_not_read() -> None:
    cut = make_trajectory([([1, 2], [3])], status="truncated", stop_reason="context")
    longer = replace(cut, next_prompt_ids=np.full(129, 4, np.int32))  # the tiny models have 128 positions
    fits = replace(cut, next_prompt_ids=np.full(128, 4, np.int32))
    critic = make_critic()
    _, [final] = critic.state_values([Group(cut.task, (cut, longer, fits))], [])
    assert final[0] == final[1] != final[2]


# The loss


@given(
    st.lists(st.tuples(*[st.floats(-3, 3, width=32)] * 3), min_size=1, max_size=9),
    st.none() | st.floats(0.0625, 2, width=32),
)
def test_the_clipped_loss_is_the_larger_of_the_two(numbers: list[Any], clip: float | None) -> None:
    value, target, old = np.array(numbers, np.float64).T
    loss, clipped = value_loss(*(torch.from_numpy(x) for x in (value, target, old)), clip)
    wanted = 0.5 * (value - target) ** 2
    if clip is not None:
        kept = 0.5 * (old + np.clip(value - old, -clip, clip) - target) ** 2
        assert clipped.numpy().tolist() == ((np.abs(value - old) > clip) & (kept > wanted)).tolist()
        wanted = np.maximum(wanted, kept)
    assert loss.numpy() == pytest.approx(wanted, abs=1e-12)


def test_a_value_that_has_moved_far_enough_is_pushed_no_further() -> None:
    value = torch.tensor([0.9, 0.9, -0.9], requires_grad=True)
    loss, clipped = value_loss(value, torch.tensor([2.0, 0.95, 2.0]), torch.zeros(3), 0.5)
    loss.sum().backward()
    assert value.grad is not None
    assert clipped.tolist() == [True, True, False]
    assert value.grad.tolist()[:2] == [0, 0] and value.grad[2] == pytest.approx(-2.9)


def test_explained_variance_is_one_for_a_perfect_critic_and_left_out_without_variance() -> None:
    rng = np.random.default_rng(0)
    values, targets = (rng.normal(size=50).astype(np.float32) for _ in range(2))
    wanted = 1 - ((targets - values) - (targets - values).mean()).var() / targets.var()
    assert explained_variance(values, targets) == pytest.approx(wanted, rel=1e-5)
    assert explained_variance(targets, targets) == 1
    assert explained_variance(targets + 3, targets) == pytest.approx(1)
    assert explained_variance(np.zeros(50, np.float32), targets) == pytest.approx(0, abs=1e-7)
    assert explained_variance(values, np.full(50, 0.1, np.float32)) is None
    assert explained_variance(values[:1], targets[:1]) is None


@pytest.mark.parametrize("clip", [None, 0.4])
@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gemma3"])
def test_the_gradient_is_that_of_separate_rows(kind: str, clip: float | None) -> None:
    rows = random_rows(5)
    targets, old = aims(rows, 5)
    critic = make_critic(kind, clip=clip, max_positions=24, clip_norm=None)
    inner, head = copy.deepcopy(critic.trunk.inner), copy.deepcopy(critic.head)
    count = sum(int((~np.isnan(t)).sum()) for t in targets)
    total = torch.zeros(())
    for row, target, before in zip(rows, targets, old, strict=True):
        known = torch.from_numpy(~np.isnan(target))
        value = separate_values(inner, head, row)[known]
        aim, was = torch.from_numpy(target)[known], torch.from_numpy(before)[known]
        loss = (value - aim) ** 2
        if clip is not None:
            loss = torch.maximum(loss, (was + torch.clamp(value - was, -clip, clip) - aim) ** 2)
        total = total + 0.5 * loss.sum() / count
    total.backward()
    wanted = {f"trunk.{n}": p.grad for n, p in inner.named_parameters()}
    wanted |= {f"head.{n}": p.grad for n, p in head.named_parameters()}
    seen: dict[str, torch.Tensor] = {}
    for part, optimizer in critic.optimizers.items():

        def look(rate: float, scale: float = 1.0, part: str = part, optimizer: Any = optimizer) -> None:
            seen.update({f"{part}.{n}": m.grad.clone() for n, m in optimizer.masters.items()})

        optimizer.step = look  # type: ignore[method-assign]
    stats = critic.update(rows, targets, old)
    assert stats["value_loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    assert stats["targets"] == count and ("value_clip_share" in stats) == (clip is not None)
    assert seen.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient is not None
        torch.testing.assert_close(seen[name], gradient, rtol=1e-3, atol=1e-5)
    norm = float(torch.nn.utils.get_total_norm([g for g in wanted.values() if g is not None]))
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-4)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), limit=st.sampled_from([16, 24, 48]))
def test_the_update_does_not_depend_on_the_packing(seed: int, limit: int) -> None:
    rows = random_rows(seed, count=5)
    results = []
    for max_positions in (limit, 4096):
        critic = make_critic(max_positions=max_positions, eps=1e-3, clip=0.5)
        stats = critic.update(rows, *aims(rows, seed))
        results.append((parameters(critic), stats))
    (few, few_stats), (many, many_stats) = results
    for name in few:
        torch.testing.assert_close(few[name], many[name], rtol=1e-4, atol=2e-5)
    for name in ("value_loss", "value_clip_share", "grad_norm"):
        assert few_stats[name] == pytest.approx(many_stats[name], rel=1e-4, abs=1e-6)
    assert many_stats["positions"] <= few_stats["positions"]


def test_case_2_7_what_stands_at_a_token_without_a_target_does_not_matter() -> None:
    rows = random_rows(3)
    targets, old = aims(rows, 3)
    # More rows without any target, and any old value where there is none.
    more = [make_row([1, 2, 3], [0, 1, 1], trajectory=90)]
    wild = [np.where(np.isnan(t), np.inf, o).astype(np.float32) for t, o in zip(targets, old, strict=True)]
    plain, other = make_critic(clip=0.2), make_critic(clip=0.2)
    first = plain.update(rows, targets, old)
    second = other.update(
        [*rows, *more], [*targets, np.full(2, np.nan, np.float32)], [*wild, np.full(2, np.nan, np.float32)]
    )
    assert same(parameters(plain), parameters(other))
    assert {n: v for n, v in first.items() if n != "seconds"} == {n: v for n, v in second.items() if n != "seconds"}


def test_only_the_positions_up_to_the_last_target_are_run() -> None:
    rows = [make_row(range(20), [0, 0, *[1] * 18])]
    targets = [np.full(18, np.nan, np.float32)]
    targets[0][0] = 1.0
    assert make_critic().update(rows, targets, [np.zeros(18, np.float32)])["positions"] == 2


# Training


def test_a_critic_learns_a_toy_value_function() -> None:
    """The value of a state is the share of ones among the tokens so far."""
    rng = np.random.default_rng(0)
    rows = [make_row(rng.integers(0, 2, 10), [0, *[1] * 9], trajectory=i) for i in range(16)]
    targets = [(np.cumsum(row.ids)[:-1] / np.arange(1, 10)).astype(np.float32) for row in rows]
    critic = Critic(make_model(), LearnerSection(learning_rate=1e-2, mini_batch=8))
    losses, explained = [], []
    for number in range(15):
        stats = critic.update(rows, targets, critic.values(rows), seed=number)
        losses.append(stats["value_loss"])
        explained.append(stats["explained_variance"])
    assert losses[-1] < losses[0] / 10
    assert explained[0] < 0.2 and explained[-1] > 0.8
    assert critic.batches == 15 and critic.steps == 30
    assert stats["value_mean"] == pytest.approx(stats["target_mean"], abs=0.1)


@pytest.mark.parametrize("trunk", ["separate", "shared"])
def test_case_7_5_a_resumed_critic_is_the_uninterrupted_one_bit_for_bit(trunk: Any) -> None:
    batches = [random_rows(seed) for seed in range(5)]
    options = {"warmup_steps": 2, "schedule": "cosine", "total_steps": 5, "mini_batch": 4, "trunk": trunk, "clip": 0.2}

    def train(critic: Critic, which: range) -> dict[str, torch.Tensor]:
        for number in which:
            critic.update(batches[number], *aims(batches[number], number), seed=number)
        return parameters(critic)

    whole = make_critic(**options)
    train(whole, range(3))
    state = copied(whole.state_dict())
    wanted = train(whole, range(3, 5))
    resumed = make_critic(**options, seed=7)
    resumed.load_state_dict(state)
    assert resumed.batches == 3
    assert same(train(resumed, range(3, 5)), wanted)
    with pytest.raises(RunError, match=r"does not fit at '.*critic\.trunk"):
        make_critic(trunk="separate" if trunk == "shared" else "shared").load_state_dict(state)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted() -> None:
    critic = make_critic()
    rows = random_rows(9)
    targets, old = aims(rows, 9)
    before = parameters(critic)
    stats = critic.update(rows, [np.where(np.isnan(t), t, np.inf).astype(np.float32) for t in targets], old)
    assert stats["skipped_updates"] == 1 and critic.skipped == 1
    assert same(before, parameters(critic))
    assert critic.update(rows, targets, old)["skipped_updates"] == 0
    assert all(np.isfinite(values).all() for values in critic.values(rows))


def test_the_gradient_norm_over_trunk_and_head_is_clipped() -> None:
    # With eps far above the gradient, Adam's step is learning_rate * gradient / eps.
    options = {"eps": 1e6, "betas": (0.0, 0.0), "learning_rate": 1e6}
    free, clipped = make_critic(clip_norm=None, **options), make_critic(clip_norm=0.25, **options)
    start, rows = parameters(free), random_rows(1)
    norm = free.update(rows, *aims(rows, 1))["grad_norm"]
    assert clipped.update(rows, *aims(rows, 1))["grad_norm"] == pytest.approx(norm) and norm > 0.25
    for critic, length in ((free, norm), (clipped, 0.25)):
        after = parameters(critic)
        moved = torch.nn.utils.get_total_norm([after[name] - start[name] for name in start])
        assert float(moved) == pytest.approx(length, rel=1e-2)


def test_what_contradicts_itself_is_named() -> None:
    critic, rows = make_critic(), random_rows(1)
    targets, old = aims(rows, 1)
    with pytest.raises(RunError, match="nothing to learn from"):
        critic.update(rows, [np.full_like(t, np.nan) for t in targets], old)
    with pytest.raises(ValueError, match="old_values needs one array for each row"):
        critic.update(rows, targets, old[:-1])
    with pytest.raises(RecipeError, match="total_steps"):
        make_critic(schedule="linear")
    with pytest.raises(RecipeError, match="separate or shared"):
        make_critic(trunk="both")


def test_a_critic_learns_ten_times_as_fast_unless_told() -> None:
    actor = LearnerSection(learning_rate=2e-5, epochs=3)
    assert critic_settings(actor).learning_rate == pytest.approx(2e-4)
    assert critic_settings(actor).epochs == 3
    assert critic_settings(actor, 1e-3).learning_rate == 1e-3


# On the policy's trunk


def joint(*, detach: bool = False, **options: Any) -> tuple[Learner, Critic]:
    learner = Learner(make_model("llama_tied"), LearnerSection(**{"learning_rate": 1e-2, **options}))
    return learner, make_critic(
        model=learner.model, trunk="shared", coefficient=0.7, detach=detach, clip=0.4, **options
    )


def gradients(optimizer: Any) -> dict[str, torch.Tensor]:
    """Filled when the optimiser takes its step, which it then does not."""
    seen: dict[str, torch.Tensor] = {}

    def look(rate: float, scale: float = 1.0) -> None:
        seen.update({name: m.grad.clone() for name, m in optimizer.masters.items() if m.grad is not None})
        optimizer.clear()

    optimizer.step = look
    return seen


@pytest.mark.parametrize("detach", [False, True])
def test_policy_and_critic_have_the_gradient_of_the_plain_sum(detach: bool) -> None:
    rows = [
        make_row(r.ids, r.trained, trajectory=i, advantage=0.0 if i % 2 else r.advantages[r.trained])
        for i, r in enumerate(random_rows(6))
    ]
    targets, old = aims(rows, 6)
    learner, critic = joint(detach=detach, max_positions=24)
    model, head = make_model("llama_tied"), copy.deepcopy(critic.head)
    tokens = sum(int(row.trained.sum()) for row in rows)
    count = sum(int((~np.isnan(t)).sum()) for t in targets)
    policy_part, value_part = torch.zeros(()), torch.zeros(())
    for row, target, before in zip(rows, targets, old, strict=True):
        advantage = torch.from_numpy(row.advantages[row.trained])
        policy_part = policy_part - (advantage * separate_logprobs(model, row)).sum() / tokens
        known = torch.from_numpy(~np.isnan(target))
        ids = torch.from_numpy(row.ids.astype(np.int64))
        hidden = model.model(input_ids=ids[None]).last_hidden_state[0]
        value = head(hidden.detach() if detach else hidden)[torch.from_numpy(np.flatnonzero(row.trained) - 1)][known]
        aim, was = torch.from_numpy(target)[known], torch.from_numpy(before)[known]
        kept = was + torch.clamp(value - was, -0.4, 0.4)
        value_part = value_part + 0.5 * torch.maximum((value - aim) ** 2, (kept - aim) ** 2).sum() / count
    (policy_part + 0.7 * value_part).backward()

    ours, heads = gradients(learner.optimizer), gradients(critic.optimizers["head"])
    objective = critic.objective(rows, rows, targets, old)
    stats = learner.update(rows, loss=reinforce(), auxiliary=objective)
    for seen, wanted in ((ours, model), (heads, head)):
        for name, parameter in wanted.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(seen[name], parameter.grad, rtol=1e-3, atol=1e-5)
    assert stats["loss"] == pytest.approx(float((policy_part + 0.7 * value_part).detach()), rel=1e-4)
    own = objective.finish()
    assert own["value_loss"] == pytest.approx(float(value_part.detach()), rel=1e-4)
    assert own["targets"] == count and own["updates"] == 1 and "explained_variance" in own
    assert critic.batches == 1 and critic.steps == 1


def test_rows_without_an_advantage_learn_their_values_and_those_without_targets_do_not() -> None:
    rows = random_rows(4, count=6)
    flat = [make_row(r.ids, r.trained, trajectory=i, advantage=0.0) for i, r in enumerate(rows)]
    targets = [np.full(int(r.trained.sum()), 1.5, np.float32) for r in flat]
    learner, critic = joint(mini_batch=3)
    extra = make_row(
        [1, 2, 3], [0, 0, 1], trajectory=99, advantage=0.0
    )  # a demonstration: the critic knows no such row
    for number in range(10):
        values = critic.values(flat)
        objective = critic.objective([extra, *flat], flat, targets, values)
        learner.update([extra, *flat], loss=reinforce(), auxiliary=objective, seed=number)
        stats = objective.finish()
        if number == 0:
            first = stats
    assert stats["value_loss"] < first["value_loss"] / 10
    assert stats["targets"] == sum(map(len, targets)) and stats["updates"] == 3
    assert critic.batches == 10


def test_alone_a_critic_on_the_policys_trunk_learns_its_head_only() -> None:
    rows = random_rows(4)
    learner, critic = joint()
    before, head = copy.deepcopy(learner.model.state_dict()), critic.head.weight.detach().clone()
    stats = [critic.update(rows, *aims(rows, 4)) for _ in range(3)]
    assert same(before, learner.model.state_dict()) and not torch.equal(head, critic.head.weight)
    assert stats[-1]["value_loss"] < stats[0]["value_loss"]
    assert all(p.grad is None for p in learner.model.parameters())
