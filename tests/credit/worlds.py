"""Worlds so small that every episode can be enumerated, with a tabular softmax policy in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from renma.types import Action, Step, Task, Trajectory

TASK = Task("t", "?")


@dataclass(frozen=True)
class Path:
    """One whole episode: for each step its tokens as (node of the policy's table, choice), and its reward."""

    steps: tuple[tuple[tuple[str, int], ...], ...]
    rewards: tuple[float, ...]
    outcome: float = 0.0

    @property
    def tokens(self):
        return [token for step in self.steps for token in step]

    @property
    def ret(self):
        return sum(self.rewards) + self.outcome

    @property
    def step_of(self):
        return np.array([k for k, step in enumerate(self.steps) for _ in step])


class World:
    """All episodes, and a table of logits for each node."""

    def __init__(self, paths, sizes, seed=0):
        self.paths, self.sizes = paths, sizes
        offsets = np.cumsum([0, *sizes.values()])
        self.slices = {name: slice(a, b) for name, a, b in zip(sizes, offsets, offsets[1:], strict=False)}
        self.theta = np.random.default_rng(seed).normal(size=int(offsets[-1]))

    def logprobs(self, theta):
        """log pi of every node's choices, in one table like theta."""
        return torch.cat([theta[s].log_softmax(0) for s in self.slices.values()])

    def place(self, token):
        return self.slices[token[0]].start + token[1]

    def path_logprob(self, table, path):
        return sum(table[self.place(token)] for token in path.tokens)

    @cached_property
    def table(self):
        return self.logprobs(torch.from_numpy(self.theta))

    @cached_property
    def probabilities(self):
        return np.array([math.exp(self.path_logprob(self.table, path)) for path in self.paths])

    @cached_property
    def scores(self):
        """For each path [tokens, parameters]: the gradient of each token's log pi."""
        return [np.array([self.score(token) for token in path.tokens]) for path in self.paths]

    def score(self, token):
        gradient = np.zeros(len(self.theta))
        where = self.slices[token[0]]
        gradient[where] = -self.table[where].exp().numpy()
        gradient[self.place(token)] += 1
        return gradient

    def derivative(self, objective):
        """The gradient of objective(probabilities of all paths, log pi of every choice)."""
        theta = torch.from_numpy(self.theta.copy()).requires_grad_()
        table = self.logprobs(theta)
        paths = torch.stack([self.path_logprob(table, path) for path in self.paths]).exp()
        objective(paths, table).backward()
        return theta.grad.numpy()

    @cached_property
    def policy_gradient(self):
        returns = torch.tensor([path.ret for path in self.paths], dtype=torch.float64)
        return self.derivative(lambda paths, _: paths @ returns)

    def trajectory(self, path):
        steps = []
        for actions, reward in zip(path.steps, path.rewards, strict=True):
            ids = np.array([choice for _, choice in actions], np.int32)
            logprobs = np.array([float(self.table[self.place(a)]) for a in actions], np.float32)
            key = actions[0][0]
            steps.append(
                Step(np.ones(1, np.int32), ids, logprobs, ids * 0, Action(""), reward={"r": reward}, state_key=key)
            )
        return Trajectory(TASK, 0, tuple(steps), "done", "answer", rewards={"outcome": path.outcome})

    def value(self, prefix, gamma=1.0, per="token"):
        """The expected discounted return from after a prefix of tokens: the right critic there."""
        after = [i for i, path in enumerate(self.paths) if path.tokens[: len(prefix)] == prefix]
        returns = [to_go(self.paths[i], gamma, per)[len(prefix)] for i in after]
        return float(np.average(returns, weights=self.probabilities[after]))


def to_go(path, gamma, per):
    """At each token, the return from its time on: a token is a moment of time, or a step is (per)."""
    rewards = np.zeros(len(path.tokens))
    ends = np.flatnonzero(np.diff(path.step_of, append=-1))
    rewards[ends] += path.rewards
    rewards[-1] += path.outcome
    time = np.arange(len(rewards)) if per == "token" else path.step_of
    return [sum(gamma ** (time[u] - time[t]) * rewards[u] for u in range(t, len(rewards))) for t in range(len(rewards))]


def bandit(seed=0):
    paths = [Path(((("pick", a),),), (), r) for a, r in ((0, 1.0), (1, 0.2))]
    paths += [Path(((("pick", 2), ("how", b)),), (), r) for b, r in ((0, 0.7), (1, -0.4))]
    return World([Path(p.steps, (0.0,), p.outcome) for p in paths], {"pick": 3, "how": 2}, seed)


def chain(seed=0):
    """At each of three states: on safely (one token), or boldly (two): on, or out. Bold at first pays at the end."""
    paths = []

    def go(k, steps, rewards, bold):
        if k == 3:
            paths.append(Path(steps, rewards, float(bold)))
            return
        first = f"s{k}"
        go(k + 1, (*steps, ((first, 0),)), (*rewards, 0.1 * k), bold)
        go(k + 1, (*steps, ((first, 1), (f"m{k}", 0))), (*rewards, 0.0), bold or k == 0)
        paths.append(Path((*steps, ((first, 1), (f"m{k}", 1))), (*rewards, -0.3), 0.2 * k))

    go(0, (), (), False)
    return World(paths, {f"{kind}{k}": 2 for k in range(3) for kind in "sm"}, seed)
