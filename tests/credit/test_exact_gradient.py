"""Expected gradients without noise: every outcome of a group is enumerated, and weighed with its probability.

Two worlds with a tabular softmax policy in float64: a bandit, and a chain of three states where an early choice is paid
for at the end, some actions are two tokens, and episodes end early. Advantages and weights are the package's; the
policy gradient they are held against is the derivative of the expected return. What is biased is shown to be so, by
exactly what theory says.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from renma.credit import ESTIMATORS, Evidence, credit
from renma.learning import CORRECTIONS, LOSSES
from renma.learning.aggregate import weights
from renma.learning.losses import LossInput
from renma.learning.losses.kl import k1, k2, k3, k3_ratio
from renma.types import Group
from tests.credit.worlds import TASK, Path, World, bandit, chain, to_go

EXACT = 2e-6  # advantages are float32


def expected(world, estimator, members, *, aggregate="constant", evidence=None, whole_batch=False):
    """E[sum of weight x advantage x gradient of log pi] over every group of `members` episodes; the order of members
    changes nothing (test_invariances.py), so each set is met once and counted as often as it can be ordered.

    evidence(path) -> keyword -> a value for the path's tokens. whole_batch: a group is a batch of groups of one.
    """
    trajectories = [world.trajectory(path) for path in world.paths]
    total = np.zeros(len(world.theta))
    outcomes = list(itertools.combinations_with_replacement(range(len(world.paths)), members))
    batches = []
    for outcome in outcomes:
        own = tuple(trajectories[i] for i in outcome)
        batches.append([Group(TASK, (t,)) for t in own] if whole_batch else [Group(TASK, own)])
    if whole_batch:  # what couples the groups of a batch must see one batch at a time
        advantages = [[row[0] for row in credit(estimator, batch).advantages] for batch in batches]
    else:
        given = None if evidence is None else evidence([[world.paths[i] for i in outcome] for outcome in outcomes])
        advantages = credit(estimator, [batch[0] for batch in batches], given).advantages
    for outcome, rows in zip(outcomes, advantages, strict=True):
        lengths = [len(world.paths[i].tokens) for i in outcome]
        steps = np.concatenate([world.paths[i].step_of for i in outcome])
        share = weights(aggregate, np.repeat(np.arange(members), lengths), steps)
        scores = np.concatenate([world.scores[i] for i in outcome])
        orders = math.factorial(members) / math.prod(math.factorial(count) for count in Counter(outcome).values())
        chance = orders * math.prod(world.probabilities[i] for i in outcome)
        total += chance * ((share * np.concatenate(rows)) @ scores)
    return total


def critic(world, gamma, per, wrong=0.0):
    """The right critic's values (or wrong ones) as evidence; `final` is 0: every episode terminates."""
    known = {}

    def value(prefix):
        if prefix not in known:
            rng = np.random.default_rng(len(known))
            known[prefix] = world.value(list(prefix), gamma, per) + wrong * rng.normal()
        return known[prefix]

    def evidence(groups):
        values = [[np.array([value(tuple(p.tokens[:t])) for t in range(len(p.tokens))]) for p in g] for g in groups]
        return Evidence(values=values, final=[[0.0] * len(g) for g in groups])

    return evidence


WORLDS = {"bandit": bandit, "chain": chain}
both = pytest.mark.parametrize("make", WORLDS.values(), ids=WORLDS)


# -- unbiased ----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("seed", [0, 1])
def test_the_return_itself_is_unbiased(make, seed):
    world = make(seed)
    assert expected(world, ESTIMATORS["reinforce"](), 1) == pytest.approx(world.policy_gradient, abs=EXACT)


@both
@pytest.mark.parametrize("members", [2, 3])
def test_leave_one_out_is_unbiased(make, members):
    world = make()
    assert expected(world, ESTIMATORS["rloo"](), members) == pytest.approx(world.policy_gradient, abs=EXACT)


@both
def test_a_greedy_baseline_is_unbiased(make):
    world = make()
    greedy = max(world.paths, key=lambda path: world.path_logprob(world.table, path)).ret
    assert greedy != 0
    given = expected(world, ESTIMATORS["remax"](), 1, evidence=lambda groups: Evidence(greedy=[greedy] * len(groups)))
    assert given == pytest.approx(world.policy_gradient, abs=EXACT)


@both
@pytest.mark.parametrize("per", ["token", "step"])
@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_gae_with_the_right_critic_is_unbiased(make, per, lam):
    world = make()
    estimator = ESTIMATORS[f"gae_{per}"](gamma=1.0, lam=lam, whiten=False)
    given = expected(world, estimator, 1, evidence=critic(world, 1.0, per))
    assert given == pytest.approx(world.policy_gradient, abs=EXACT)


@pytest.mark.parametrize("per", ["token", "step"])
def test_gae_with_a_wrong_critic_is_unbiased_only_at_lambda_1(per):
    world = chain()

    def given(lam):
        estimator = ESTIMATORS[f"gae_{per}"](gamma=1.0, lam=lam, whiten=False)
        return expected(world, estimator, 1, evidence=critic(world, 1.0, per, wrong=0.5))

    assert given(1.0) == pytest.approx(world.policy_gradient, abs=EXACT)
    assert np.abs(given(0.7) - world.policy_gradient).max() > 0.01


@pytest.mark.parametrize("kl", [0.3])
def test_k1_in_the_reward_pulls_by_the_gradient_of_the_whole_episodes_kl(kl):
    world = chain()
    reference = World(world.paths, world.sizes, seed=7).table

    def penalties(path):
        return np.array([-kl * k1(float(world.table[i]), float(reference[i])) for i in map(world.place, path.tokens)])

    def evidence(groups):
        return Evidence(penalties=[[penalties(path) for path in group] for group in groups])

    def objective(paths, table):
        returns = torch.tensor([path.ret for path in world.paths], dtype=torch.float64)
        log_ratio = torch.stack([world.path_logprob(table - reference, path) for path in world.paths])
        return paths @ (returns - kl * log_ratio)

    given = expected(world, ESTIMATORS["rloo"](), 2, evidence=evidence)
    assert given == pytest.approx(world.derivative(objective), abs=EXACT)
    assert np.abs(given - world.policy_gradient).max() > 0.01


# -- biased, and by how much -------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("members", [2, 3])
def test_a_mean_that_contains_the_member_shrinks_the_gradient(make, members):
    world = make()
    shrunk = world.policy_gradient * (members - 1) / members
    assert expected(world, ESTIMATORS["dr_grpo"](), members) == pytest.approx(shrunk, abs=EXACT)
    batch_mean = ESTIMATORS["reinforce"](baseline="batch_mean")
    assert expected(world, batch_mean, members, whole_batch=True) == pytest.approx(shrunk, abs=EXACT)


def coin(chance):
    """Two choices of one token: 1 with this probability, or 0."""
    world = World([Path(((("pick", a),),), (0.0,), float(a)) for a in (0, 1)], {"pick": 2})
    world.theta = np.array([0.0, math.log(chance / (1 - chance))])
    return world


@pytest.mark.parametrize("members", [3, 5])
def test_grpo_scales_a_task_by_how_far_its_chance_is_from_one_half(members):
    """E[sqrt(f (1 - f))] / (p (1 - p)), f the share of the group that succeeds: the nearer p is to 0 or 1 the more
    (but in a pair, whose only std is 1/2)."""
    factors = {}
    for chance in (0.05, 0.2, 0.5, 0.95):
        world = coin(chance)
        shares = [k / members for k in range(members + 1)]
        mass = [math.comb(members, k) * chance**k * (1 - chance) ** (members - k) for k in range(members + 1)]
        spread = sum(m * math.sqrt(f * (1 - f)) for m, f in zip(mass, shares, strict=True))
        factors[chance] = spread / (chance * (1 - chance))
        given = expected(world, ESTIMATORS["grpo"](), members)
        assert given == pytest.approx(factors[chance] * world.policy_gradient, rel=1e-4)
    assert factors[0.05] == pytest.approx(factors[0.95])
    assert factors[0.05] > factors[0.2] > factors[0.5]


@pytest.mark.parametrize("members", [2, 3])
def test_reinforce_pp_is_grpo_over_the_whole_batch_where_actions_are_single_tokens(members):
    world = coin(0.2)
    whitened = expected(world, ESTIMATORS["reinforce_pp"](), members, whole_batch=True)
    assert whitened == pytest.approx(expected(world, ESTIMATORS["grpo"](), members), rel=1e-4)


def test_a_mean_over_each_sequence_punishes_a_long_mistake_less():
    """A right choice and two equally wrong ones, of one token and of four: only `constant` treats these alike."""
    rest = tuple((f"forced{i}", 0) for i in range(3))
    choices = [((("pick", 0),), 1.0), ((("pick", 1),), 0.0), ((("pick", 2), *rest), 0.0)]
    world = World(
        [Path((tokens,), (0.0,), r) for tokens, r in choices], {"pick": 3, **{f"forced{i}": 1 for i in range(3)}}
    )
    world.theta = np.zeros(len(world.theta))
    by_length = {}
    for aggregate in ("constant", "sequence_mean"):
        by_length[aggregate] = expected(world, ESTIMATORS["dr_grpo"](), 2, aggregate=aggregate)
    _, short, long = by_length["constant"][:3]
    assert short == pytest.approx(long)
    right, short, long = by_length["sequence_mean"][:3]
    assert short < long < right
    # E[A / length x gradient of log pi], A = (R - mean of the other) / 2 in a pair
    mean = 1 / 3
    terms = [p * (path.ret - mean) / 2 / len(path.tokens) * scores[0] for p, path, scores in zip(
        world.probabilities, world.paths, world.scores, strict=True)]  # fmt: skip
    assert by_length["sequence_mean"] == pytest.approx(np.sum(terms, axis=0), abs=EXACT)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("members", [2, 3])
def test_gigpo_adds_each_states_own_gradient_shrunk_by_how_seldom_it_is_shared(gamma, members):
    """dr_grpo plus, for each state s reached with probability d, (d - (1 - (1 - d)^n) / n) / d of s's own part of the
    policy gradient (of the discounted return-to-go): a state that is met by one member alone teaches nothing."""
    world = chain()
    own = {f"s{k}": np.zeros(len(world.theta)) for k in range(3)}
    reached = dict.fromkeys(own, 0.0)
    for chance, path, scores in zip(world.probabilities, world.paths, world.scores, strict=True):
        returns = to_go(path, gamma, "step")
        for k, actions in enumerate(path.steps):
            tokens = path.step_of == k
            own[actions[0][0]] += chance * returns[int(np.argmax(tokens))] * scores[tokens].sum(0)
            reached[actions[0][0]] += chance
    if gamma == 1:
        assert sum(own.values()) == pytest.approx(world.policy_gradient, abs=1e-9)
    step_part = sum((d - (1 - (1 - d) ** members) / members) / d * own[s] for s, d in reached.items())
    for omega in (0.0, 1.0, 0.5):
        given = expected(world, ESTIMATORS["gigpo"](omega=omega, gamma=gamma), members)
        wanted = world.policy_gradient * (members - 1) / members + omega * step_part
        assert given == pytest.approx(wanted, abs=EXACT)


def test_a_discount_is_a_bias_and_per_token_a_larger_one_than_per_step():
    """With the right critic of the discounted return. The delayed part of the return is what is forgotten."""
    world = chain()
    away = {}
    for per, gamma in itertools.product(("token", "step"), (0.99, 0.9, 0.5)):
        estimator = ESTIMATORS[f"gae_{per}"](gamma=gamma, lam=0.9, whiten=False)
        given = expected(world, estimator, 1, evidence=critic(world, gamma, per))
        away[per, gamma] = float(np.linalg.norm(given - world.policy_gradient))
    for per in ("token", "step"):
        assert 0.001 < away[per, 0.99] < away[per, 0.9] < away[per, 0.5]
    assert all(away["token", gamma] > away["step", gamma] for gamma in (0.99, 0.9, 0.5))


# -- the KL as a loss --------------------------------------------------------------------------------------------------


def test_case_2_13_the_gradient_of_each_kl_estimate():
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.4, -0.1], dtype=torch.float64).log_softmax(0)

    def gradient(estimate):
        logp = logits.log_softmax(0)
        chance = logp.detach().exp()
        return torch.autograd.grad((chance * estimate(logp)).sum(), logits)[0].numpy()

    logp = logits.log_softmax(0)
    kl = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits)[0].numpy()
    assert kl == pytest.approx([0.0224, -0.1794, 0.1570], abs=5e-5)
    assert gradient(lambda logp: k1(logp, reference)) == pytest.approx([0, 0, 0], abs=1e-12)
    assert gradient(lambda logp: k2(logp, reference)) == pytest.approx(kl, abs=1e-12)
    assert gradient(lambda logp: k3(logp, reference)) == pytest.approx([0.0592, -0.2247, 0.1655], abs=5e-5)
    assert gradient(lambda logp: k3_ratio(logp, reference, logp.detach())) == pytest.approx(kl, abs=1e-12)


# -- losses and corrections --------------------------------------------------------------------------------------------


def loss_gradient(world, path, loss, advantage, old):
    """The gradient of the summed loss of one episode whose tokens have the log-probabilities `old` under pi_old."""
    theta = torch.from_numpy(world.theta.copy()).requires_grad_()
    places = torch.tensor([world.place(token) for token in path.tokens])
    n = len(places)
    steps = torch.from_numpy(path.step_of)
    given = LossInput(
        world.logprobs(theta)[places], old, old, torch.full((n,), advantage, dtype=torch.float64), None,
        torch.zeros(n, dtype=torch.int64), steps,
    )  # fmt: skip
    loss(given)[0].sum().backward()
    return theta.grad.numpy()


@pytest.mark.parametrize("name", ["reinforce", "ppo_clip", "gspo", "step_ratio", "cispo", "decoupled"])
def test_every_loss_is_the_policy_gradient_at_the_policy_that_sampled(name):
    world = chain()
    total = np.zeros(len(world.theta))
    for chance, path in zip(world.probabilities, world.paths, strict=True):
        old = world.table[[world.place(token) for token in path.tokens]]
        total -= chance * loss_gradient(world, path, LOSSES[name](), path.ret, old)
    assert total == pytest.approx(world.policy_gradient, abs=1e-9)


def off_policy(world, sampler, correction):
    """E over the sampler's episodes of factor x return x gradient of log pi."""
    total = np.zeros(len(world.theta))
    for chance, path, scores in zip(sampler.probabilities, world.paths, world.scores, strict=True):
        places = [world.place(token) for token in path.tokens]
        delta = (world.table - sampler.table)[places].numpy()
        factor = correction.apply(delta, np.zeros(len(places), np.int64), path.step_of).factor
        total += chance * path.ret * (factor @ scores)
    return total


def test_weights_of_whole_sequences_correct_another_sampler_exactly_and_token_weights_do_not():
    world = chain()
    sampler = World(world.paths, world.sizes, seed=3)
    uncapped = off_policy(world, sampler, CORRECTIONS["sequence_tis"](cap=1e6))
    assert uncapped == pytest.approx(world.policy_gradient, abs=EXACT)
    for name, options in (("token_tis", {"cap": 1e6}), ("sequence_tis", {"cap": 1.5})):
        assert np.abs(off_policy(world, sampler, CORRECTIONS[name](**options)) - world.policy_gradient).max() > 0.01


def test_token_weights_are_exact_where_an_episode_is_one_token():
    world, sampler = coin(0.3), coin(0.7)
    given = off_policy(world, sampler, CORRECTIONS["token_tis"](cap=1e6))
    assert given == pytest.approx(world.policy_gradient, abs=EXACT)
