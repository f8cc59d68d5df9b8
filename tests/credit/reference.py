"""Every estimator again, slowly: plain Python floats, sums written out, one trajectory and one token at a time.

Written from the definitions, sharing no code with the package. Each takes groups and evidence and gives, for each
group, for each trainable trajectory, a list with one float a sampled token.
"""

from __future__ import annotations

import math

NAN = float("nan")


# -- places of rewards -----------------------------------------------------------------------------------------------


def trainable(group):
    return [t for t in group.trajectories if t.status != "failed" and any(len(s.action_ids) for s in t.steps)]


def steps_of_tokens(trajectory):
    """The step number of each sampled token."""
    return [k for k, step in enumerate(trajectory.steps) for _ in range(len(step.action_ids))]


def place_of(trajectory, k):
    """Where a reward of step k lies: the last sampled token up to then, else the last one of the first acting step."""
    owners = steps_of_tokens(trajectory)
    before = [i for i, owner in enumerate(owners) if owner <= k]
    if before:
        return before[-1]
    return max(i for i, owner in enumerate(owners) if owner == owners[0])


def token_rewards(trajectory, penalties=None, process=True, outcome=True):
    rewards = [0.0] * len(steps_of_tokens(trajectory))
    if process:
        for k, step in enumerate(trajectory.steps):
            for value in step.reward.values():
                rewards[place_of(trajectory, k)] += value
    if outcome:
        for value in trajectory.rewards.values():
            rewards[-1] += value
    if penalties is not None:
        for i, value in enumerate(penalties):
            rewards[i] += float(value)
    return rewards


def by_step(trajectory, per_token):
    """{acting step: the sum over its tokens}, in order."""
    sums = {}
    for owner, value in zip(steps_of_tokens(trajectory), per_token, strict=True):
        sums[owner] = sums.get(owner, 0.0) + value
    return sums


def over_tokens(trajectory, per_step):
    return [per_step[owner] for owner in steps_of_tokens(trajectory)]


def members(groups, evidence):
    """(group number, member number, trajectory, its penalties) of every trainable trajectory."""
    for g, group in enumerate(groups):
        for m, trajectory in enumerate(trainable(group)):
            yield g, m, trajectory, None if evidence.penalties is None else evidence.penalties[g][m]


def returns(groups, evidence):
    table = [[] for _ in groups]
    for g, _, trajectory, penalties in members(groups, evidence):
        table[g].append(sum(token_rewards(trajectory, penalties)))
    return table


def nested(groups, make):
    return [[make(g, m, t) for m, t in enumerate(trainable(group))] for g, group in enumerate(groups)]


# -- statistics ------------------------------------------------------------------------------------------------------


def mean(values):
    return sum(values) / len(values)


def std(values):
    center = mean(values)
    return math.sqrt(sum((v - center) ** 2 for v in values) / len(values))


def uniform(values):
    return std(values) < 1e-6 * max(1.0, abs(mean(values)))


def centred(values, scale=False):
    if uniform(values):
        return [0.0] * len(values)
    return [(v - mean(values)) / ((std(values) + 1e-6) if scale else 1.0) for v in values]


def whiten(values):
    if len(values) < 2:
        return list(values)
    if uniform(values):
        return [0.0] * len(values)
    return [(v - mean(values)) / std(values) for v in values]


def whiten_nested(per_token):
    flat = iter(whiten([v for group in per_token for member in group for v in member]))
    return [[[next(flat) for _ in member] for member in group] for group in per_token]


def to_go(rewards, gamma):
    return [sum(gamma**j * r for j, r in enumerate(rewards[i:])) for i in range(len(rewards))]


def gae(rewards, values, final, gamma, lam):
    after = [*values[1:], final]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return to_go(deltas, gamma * lam)


# -- the estimators --------------------------------------------------------------------------------------------------


def spread(groups, table):
    return nested(groups, lambda g, m, t: [table[g][m]] * len(steps_of_tokens(t)))


def grouped(groups, evidence, one_group):
    """`one_group` of each group's returns; zeros where fewer than two are left."""
    table = [one_group(r) if len(r) > 1 else [0.0] * len(r) for r in returns(groups, evidence)]
    return spread(groups, table)


def reinforce(groups, evidence, baseline="none"):
    table = returns(groups, evidence)
    flat = [r for group in table for r in group]
    if baseline == "batch_mean" and flat:
        table = [[0.0 if uniform(flat) else r - mean(flat) for r in group] for group in table]
    return spread(groups, table)


def grpo(groups, evidence, std=True):
    return grouped(groups, evidence, lambda r: centred(r, std))


def dr_grpo(groups, evidence):
    return grpo(groups, evidence, std=False)


def rloo(groups, evidence):
    def one_group(r):
        if uniform(r):
            return [0.0] * len(r)
        return [r[i] - mean(r[:i] + r[i + 1 :]) for i in range(len(r))]

    return grouped(groups, evidence, one_group)


def remax(groups, evidence):
    return spread(groups, [[r - evidence.greedy[g] for r in own] for g, own in enumerate(returns(groups, evidence))])


def per_component(groups, evidence, weights=None, std=True):
    totals = []
    for g, group in enumerate(groups):
        own = trainable(group)
        total = [0.0] * len(own)
        if len(own) > 1:
            names = {n for t in own for n in t.rewards} | {n for t in own for s in t.steps for n in s.reward}
            for name in names:
                stepwise = any(name in s.reward for t in own for s in t.steps)
                column = {}
                for i, t in enumerate(own):
                    if stepwise or name in t.rewards:
                        column[i] = t.rewards.get(name, 0.0) + sum(s.reward.get(name, 0.0) for s in t.steps)
                if len(column) > 1:
                    for i, value in zip(column, centred(list(column.values()), std), strict=True):
                        total[i] += (weights or {}).get(name, 1.0) * value
            if evidence.penalties is not None:
                sums = centred([sum(float(v) for v in p) for p in evidence.penalties[g]])
                total = [a + b for a, b in zip(total, sums, strict=True)]
        totals.append(total)
    return spread(groups, totals)


def reinforce_pp(groups, evidence, gamma=1.0, baseline="none"):
    if baseline == "none":
        rows = [[] for _ in groups]
        for g, _, trajectory, penalties in members(groups, evidence):
            rows[g].append(to_go(token_rewards(trajectory, penalties), gamma))
        return whiten_nested(rows)
    rows = dr_grpo(groups, evidence)
    alive = [g for g, group in enumerate(groups) if len(trainable(group)) > 1]
    for g, white in zip(alive, whiten_nested([rows[g] for g in alive]), strict=True):
        rows[g] = white
    return rows


def gae_token(groups, evidence, gamma=1.0, lam=0.95, whiten=True):
    """(advantages, targets)."""
    advantages, targets = [[] for _ in groups], [[] for _ in groups]
    for g, m, trajectory, penalties in members(groups, evidence):
        values = [float(v) for v in evidence.values[g][m]]
        own = gae(token_rewards(trajectory, penalties), values, evidence.final[g][m], gamma, lam)
        advantages[g].append(own)
        targets[g].append([a + v for a, v in zip(own, values, strict=True)])
    return whiten_nested(advantages) if whiten else advantages, targets


def gae_step(groups, evidence, gamma=0.99, lam=0.95, whiten=True):
    per_step, targets = [[] for _ in groups], [[] for _ in groups]
    for g, m, trajectory, penalties in members(groups, evidence):
        owners = steps_of_tokens(trajectory)
        rewards = by_step(trajectory, token_rewards(trajectory, penalties))
        first = {k: owners.index(k) for k in rewards}
        values = [float(evidence.values[g][m][first[k]]) for k in rewards]
        own = gae(list(rewards.values()), values, evidence.final[g][m], gamma, lam)
        per_step[g].append(own)
        row = [NAN] * len(owners)
        for k, a, v in zip(rewards, own, values, strict=True):
            row[first[k]] = a + v
        targets[g].append(row)
    if whiten:
        per_step = whiten_nested(per_step)

    def tokens(g, m, trajectory):
        acting = list(by_step(trajectory, [0.0] * len(steps_of_tokens(trajectory))))
        return over_tokens(trajectory, dict(zip(acting, per_step[g][m], strict=True)))

    return nested(groups, tokens), targets


def gigpo(groups, evidence, omega=1.0, gamma=0.95, std=False):
    rows = grpo(groups, evidence, std)
    for g, group in enumerate(groups):
        own = trainable(group)
        if len(own) < 2:
            continue
        found = []  # (member, step, key, return-to-go)
        for m, trajectory in enumerate(own):
            penalties = None if evidence.penalties is None else evidence.penalties[g][m]
            rewards = by_step(trajectory, token_rewards(trajectory, penalties))
            for k, value in zip(rewards, to_go(list(rewards.values()), gamma), strict=True):
                found.append((m, k, trajectory.steps[k].state_key, value))
        for m, k, key, value in found:
            equals = [v for _, _, other, v in found if other == key]
            part = 0.0 if key is None or uniform(equals) else value - mean(equals)
            for i, owner in enumerate(steps_of_tokens(own[m])):
                if owner == k:
                    rows[g][m][i] += omega * part
    return rows


def turn_level(groups, evidence, gamma=1.0, compare="total", outcome_weight=1.0, process_weight=1.0, std=True):
    def make(g, m, trajectory):
        own = trainable(groups[g])
        if len(own) < 2:
            return [0.0] * len(steps_of_tokens(trajectory))
        wholes = returns(groups, evidence)[g] if compare == "total" else [sum(t.rewards.values()) for t in own]
        penalties = None if evidence.penalties is None else evidence.penalties[g][m]
        process = by_step(trajectory, token_rewards(trajectory, penalties, outcome=False))
        rest = dict(zip(process, to_go(list(process.values()), gamma), strict=True))
        whole = centred(wholes, std)[m]
        return over_tokens(trajectory, {k: outcome_weight * whole + process_weight * v for k, v in rest.items()})

    return nested(groups, make)


def distillation(groups, evidence, coefficient=1.0, reward=0.0, std=True):
    def make(g, m, trajectory):
        own = trainable(groups[g])
        tokens = len(steps_of_tokens(trajectory))
        if reward and len(own) < 2:
            return [0.0] * tokens
        whole = centred([sum(token_rewards(t)) for t in own], std)[m] if reward else 0.0
        logprobs = [float(v) for step in trajectory.steps for v in step.logprobs]
        penalties = [0.0] * tokens if evidence.penalties is None else evidence.penalties[g][m]
        teacher = evidence.teacher[g][m]
        return [
            coefficient * (float(teacher[i]) - logprobs[i]) + float(penalties[i]) + reward * whole
            for i in range(tokens)
        ]

    return nested(groups, make)


def pairs(groups, evidence, from_divergence=False):
    rows = nested(groups, lambda g, m, t: [0.0] * len(steps_of_tokens(t)))
    for g, own_returns in enumerate(returns(groups, evidence)):
        own = trainable(groups[g])
        if len(own) < 2 or uniform(own_returns):
            continue
        best, worst = own_returns.index(max(own_returns)), own_returns.index(min(own_returns))
        start = 0
        if from_divergence:
            seen = [[(list(s.prompt_ids), list(s.action_ids)) for s in own[i].steps] for i in (best, worst)]
            while start < min(map(len, seen)) and seen[0][start] == seen[1][start]:
                start += 1
        parts = {i: [owner >= start for owner in steps_of_tokens(own[i])] for i in (best, worst)}
        if all(any(part) for part in parts.values()):
            rows[g][best] = [float(later) for later in parts[best]]
            rows[g][worst] = [-float(later) for later in parts[worst]]
    return rows


def best(groups, evidence, threshold=1.0, per_group=None):
    table = []
    for own in returns(groups, evidence):
        keep = [r >= threshold - 1e-9 * max(1.0, abs(threshold)) for r in own]
        if per_group is not None:
            ahead = [sum(other > r or (other == r and j < i) for j, other in enumerate(own)) for i, r in enumerate(own)]
            keep = [k and a < per_group for k, a in zip(keep, ahead, strict=True)]
        table.append([float(k) for k in keep])
    return spread(groups, table)


def ones(groups, evidence):
    return nested(groups, lambda g, m, t: [1.0] * len(steps_of_tokens(t)))


def task_normalised(per_token, groups):
    rows = [[list(map(float, member)) for member in group] for group in per_token]
    for family in {group.task.family for group in groups}:
        numbers = [g for g, group in enumerate(groups) if group.task.family == family]
        for g, white in zip(numbers, whiten_nested([rows[g] for g in numbers]), strict=True):
            rows[g] = white
    return rows
