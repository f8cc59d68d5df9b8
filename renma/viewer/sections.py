"""The parts of the report, each from the run's data to HTML; an empty string where there is nothing to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from renma.evaluation.statistics import Estimate, difference_interval, estimate_mean, sign_flip
from renma.viewer.run_data import RunData
from renma.viewer.svg import Chart, Point, Series, draw, escaped, interval_mark
from renma.viewer.text import duration, number, p_text, percent, points

STAGES = (("before", "Before"), ("cold_start", "After cold start"), ("after", "After RL"))
LONGEST_TEXT = 4000  # characters of one action or observation
LINES = (  # metric, title, in percent, from zero
    ("return_mean", "Return", False, False),
    ("entropy", "Entropy (nats per token)", False, True),
    ("grad_norm", "Gradient norm", False, True),
    ("zero_std_share", "Groups without signal", True, True),
    ("loss", "Loss", False, False),
    ("kl_behaviour", "KL to the behaviour policy", False, False),
    ("clip_share", "Clipped tokens", True, True),
)
EXTRA_LINES = (  # of some algorithms only: shown where they are logged
    ("critic/explained_variance", "Critic: explained variance", False, False),
    ("critic/value_loss", "Critic: loss", False, True),
    ("preference_loss", "Preference loss", False, True),
    ("pair_accuracy", "Pairs told apart", True, True),
    ("correction_reject_share", "Tokens rejected by the correction", True, True),
    ("kl_reference", "KL to the starting policy", False, True),
)


def headline(run: RunData) -> str:
    """Title, status, what was run, and one tile per evaluation set."""
    last = run.train[-1][0] if run.train else 0
    total = run.setting("training", "steps")
    of = f" of {total}" if isinstance(total, int) else ""
    status = (
        '<span class="status done">Finished</span>'
        if run.finished
        else f'<span class="status open">Unfinished · step {last}{escaped(of)}</span>'
    )
    facts = [(label, value) for label, value in _facts(run, last) if value]
    listed = "".join(f"<div><dt>{escaped(label)}</dt><dd>{escaped(value)}</dd></div>" for label, value in facts)
    tiles = "".join(_tile(name, stages) for name, stages in run.sets.items())
    return (
        f'<header><p class="kind">Renma training report</p><h1>{escaped(run.name)} {status}</h1>'
        + (f'<div class="tiles">{tiles}</div>' if tiles else "")
        + (f'<dl class="facts">{listed}</dl>' if listed else "")
        + "</header>"
    )


def _facts(run: RunData, last: int) -> list[tuple[str, str]]:
    tasks, members = run.setting("rollout", "tasks_per_step"), run.setting("rollout", "group_size")
    rate = run.setting("learner", "learning_rate")
    model = run.setting("model", "source") or (
        "from scratch" if run.setting("model", "type") == "scratch" else run.setting("model", "type")
    )
    return [
        ("Model", str(model or "")),
        ("Environment", str(run.setting("environment", "type") or "")),
        ("Algorithm", str(run.setting("algorithm", "preset") or "")),
        ("Steps", str(last) if last else ""),
        ("Per step", f"{tasks} tasks × {members} attempts" if tasks and members else ""),
        ("Learning rate", f"{rate:g}" if isinstance(rate, float | int) else ""),
        ("Seed", str(run.setting("seed")) if run.setting("seed") is not None else ""),
        ("Time", duration(run.seconds) if run.seconds else ""),
    ]


def _tile(name: str, stages: Mapping[str, Mapping[str, Any]]) -> str:
    seen = [stages[stage]["success"] for stage, _ in STAGES if stage in stages]
    if len(seen) < 2:
        return f'<div class="tile"><p>{escaped(name)}</p><b>{percent(seen[0])}</b></div>' if seen else ""
    return (
        f'<div class="tile"><p>{escaped(name)}</p><b><i>{percent(seen[0])}</i> → {percent(seen[-1])}</b>'
        f"<p>{points(seen[-1] - seen[0])} points</p></div>"
    )


# -- before and after --------------------------------------------------------------------------------------------------


def comparison(run: RunData) -> str:
    """For each evaluation set: the stages with their intervals, and each stage's own part of the change."""
    if not run.sets:
        return '<section><h2>Before and after</h2><p class="missing">No evaluation has been summarised.</p></section>'
    tables = "".join(_set_table(name, stages) for name, stages in run.sets.items())
    return (
        f'<section><h2>Before and after</h2><p class="lead">Success on held-out tasks, with 95% intervals. '
        f"Each change is to the row above; p is of a paired test on the same tasks.</p>"
        f'<div class="sets">{tables}</div></section>'
    )


def _set_table(name: str, stages: Mapping[str, Mapping[str, Any]]) -> str:
    present = [(stage, label) for stage, label in STAGES if stage in stages]
    rows = []
    for position, (stage, label) in enumerate(present):
        here = _estimate(stages[stage])
        change = _change(stages[present[position - 1][0]], stages[stage]) if position else ""
        rows.append(
            f'<tr><th scope="row">{escaped(label)}</th><td class="figure"><b>{percent(here.value)}</b>'
            f"<small>{percent(here.low)} – {percent(here.high)}</small></td>"
            f'<td class="plot">{interval_mark(here.value, here.low, here.high, 1 if position else 0)}</td>'
            f'<td class="figure">{change}</td></tr>'
        )
    if len(present) > 2:
        total = _change(stages[present[0][0]], stages[present[-1][0]])
        rows.append(
            '<tr class="total"><th scope="row">In all</th><td></td><td class="plot"></td>'
            f'<td class="figure">{total}</td></tr>'
        )
    size = stages[present[-1][0]].get("n") if present else None
    count = f' <span class="quietly">{escaped(size)} tasks</span>' if size is not None else ""
    return (
        f'<div class="card"><h3>{escaped(name)}{count}</h3><table><thead><tr><th></th><th>Success</th>'
        '<th class="plot"><span>0 %</span><span>100 %</span></th><th>Change, points</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _estimate(entry: Mapping[str, Any]) -> Estimate:
    success = float(entry["success"])
    low, high = entry.get("low"), entry.get("high")
    n = entry.get("n")
    return Estimate(
        success,
        float(low) if isinstance(low, int | float) else success,
        float(high) if isinstance(high, int | float) else success,
        n if isinstance(n, int) else 0,
    )


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The difference with its interval: paired where each task's outcome is known, else from the two intervals."""
    old, new = _per_task(before), _per_task(after)
    if old is not None and new is not None and len(old) == len(new):
        paired = estimate_mean([b - a for a, b in zip(old, new, strict=True)], draws=4000)
        difference, low, high = paired.value, paired.low, paired.high
        told = f"<small>{p_text(sign_flip(old, new).p_value)}</small>"
    else:
        first, second = _estimate(before), _estimate(after)
        low, high = difference_interval(first, second)
        difference, told = second.value - first.value, ""
    return f"<b>{points(difference)}</b><small>{points(low)} to {points(high)}</small>{told}"


def _per_task(entry: Mapping[str, Any]) -> list[float] | None:
    counts, k = entry.get("successes"), entry.get("k", 1)
    if not isinstance(counts, list) or not counts or not isinstance(k, int) or k < 1:
        return None
    if not all(isinstance(count, int) and 0 <= count <= k for count in counts):
        return None
    return [count / k for count in counts]


def warnings(run: RunData) -> str:
    """What the collapse watch said while the run was on."""
    if not run.warnings:
        return ""
    lines = "".join(f"<li>Step {step}: {escaped(text)}.</li>" for step, text in run.warnings)
    return f'<section class="notes"><h2>Warnings</h2><ul>{lines}</ul></section>'


# -- curves ------------------------------------------------------------------------------------------------------------


def charts(run: RunData, success: Chart | None) -> str:
    """Success large, the other metrics as small multiples; absent metrics are named."""
    parts = ["<section><h2>Learning curves</h2>"]
    if success is None and not run.train and not run.cold_start:
        return "".join([*parts, '<p class="missing">No metrics have been logged.</p></section>'])
    if success is not None:
        parts.append(
            f'<figure class="card main"><figcaption><h3>Success</h3>{_keys(success.series)}</figcaption>'
            f'<div class="wide">{draw(success, 1040, 330)}</div><div class="narrow">{draw(success, 380, 270)}</div>'
            '<p class="quietly">Training batches: each step faint, running mean solid. '
            "Whiskers are 95% intervals.</p></figure>"
        )
    small, absent = [], []
    for metric, title, in_percent, from_zero in LINES:
        found = run.series(metric)
        if found:
            small.append(_small(Chart(title, [Series(title, found, 1, smooth=True)], in_percent, from_zero)))
        else:
            absent.append(title.split(" (")[0])
    for metric, title, in_percent, from_zero in EXTRA_LINES:
        found = run.series(metric)
        if any(value for _, value in found):
            small.append(_small(Chart(title, [Series(title, found, 1, smooth=True)], in_percent, from_zero)))
    small += _throughput(run) + _cold_start(run)
    parts.append(f'<div class="grid-of-charts">{"".join(small)}</div>' if small else "")
    if absent:
        parts.append(f'<p class="missing">Not logged in this run: {escaped(", ".join(absent))}.</p>')
    return "".join([*parts, "</section>"])


def _small(chart: Chart) -> str:
    value = ""
    if len(chart.series) == 1:
        y = chart.series[0].points[-1][1]
        value = f'<span class="quietly">last {percent(y) if chart.in_percent else number(y)}</span>'
    keys = _keys(chart.series) if len(chart.series) > 1 else ""
    return (
        f'<figure class="card"><figcaption><h3>{escaped(chart.title)}</h3>{value}{keys}</figcaption>'
        f"{draw(chart, 380, 190)}</figure>"
    )


def _keys(series: Sequence[Series]) -> str:
    keys = "".join(f'<span class="key"><i class="k{one.colour}"></i>{escaped(one.name)}</span>' for one in series)
    return f'<span class="keys">{keys}</span>'


def _throughput(run: RunData) -> list[str]:
    found = []
    speeds = _several(run, ("tokens_per_second", "over all"), ("tokens_per_second_rollout", "sampling"))
    if speeds:
        found.append(_small(Chart("Sampled tokens per second", speeds, from_zero=True)))
    times = _several(run, ("seconds_rollout", "rollout"), ("seconds_learn", "learning"))
    if times:
        found.append(_small(Chart("Seconds per step", times, from_zero=True)))
    return found


def _several(run: RunData, *metrics: tuple[str, str]) -> list[Series]:
    lines = [(label, run.series(metric)) for metric, label in metrics]
    return [Series(label, found, 1 + i, smooth=True) for i, (label, found) in enumerate(lines) if found]


def _cold_start(run: RunData) -> list[str]:
    losses: list[Point] = []
    for index, (_, metrics) in enumerate(run.cold_start):
        loss = metrics.get("loss", metrics.get("learner/loss"))
        if loss is not None:
            losses.append((index + 1.0, loss))
    if not losses:
        return []
    return [_small(Chart("Cold start: loss", [Series("loss", losses, 2, smooth=True)], x_label="cold-start step"))]


# -- samples and recipe ------------------------------------------------------------------------------------------------


def samples(run: RunData) -> str:
    """Sample episodes, what the agent wrote told from what it was shown."""
    head = "<section><h2>Sample episodes</h2>"
    if not run.samples:
        return f'{head}<p class="missing">No sample episodes were kept.</p></section>'
    legend = (
        '<p class="lead"><span class="sw agent"></span>written by the agent, trained on'
        '<span class="sw shown"></span>shown to it, never trained on</p>'
    )
    return head + legend + "".join(_sample(sample, i == 0) for i, sample in enumerate(run.samples)) + "</section>"


def _sample(sample: Mapping[str, Any], opened: bool) -> str:
    solved = sample.get("success")
    badge = (
        '<span class="badge">not judged</span>'
        if solved is None
        else f'<span class="badge {"yes" if solved else "no"}">{"solved" if solved else "not solved"}</span>'
    )
    task = str(sample.get("task", ""))
    first = task.strip().splitlines()[0] if task.strip() else "(no prompt)"
    tail = [f"return {number(float(sample['return']))}"] if isinstance(sample.get("return"), int | float) else []
    tail += [str(sample["stop_reason"]).replace("_", " ")] if sample.get("stop_reason") else []
    steps = sample.get("steps")
    turns = "".join(_turn(step) for step in steps if isinstance(step, dict)) if isinstance(steps, list) else ""
    answer = f'<p class="quietly">Right answer: {escaped(_cut(sample["answer"]))}</p>' if sample.get("answer") else ""
    return (
        f'<details class="card episode"{" open" if opened else ""}><summary>{badge}'
        f'<span class="task">{escaped(_cut(first, 160))}</span><span class="quietly">{escaped(" · ".join(tail))}</span>'
        f'</summary><pre class="shown">{escaped(_cut(task))}</pre>{turns}{answer}</details>'
    )


def _turn(step: Mapping[str, Any]) -> str:
    reward = step.get("reward")
    chip = (
        f'<span class="reward">reward {number(float(reward))}</span>'
        if isinstance(reward, int | float) and reward
        else ""
    )
    observation = str(step.get("observation") or "").rstrip("\n")
    shown = f'<pre class="shown">{escaped(_cut(observation))}</pre>' if observation else ""
    action = str(step.get("action", "")).rstrip("\n")
    return f'<pre class="agent">{chip}{escaped(_cut(action))}</pre>{shown}'


def _cut(text: object, limit: int = LONGEST_TEXT) -> str:
    whole = str(text)
    rest = len(whole) - limit
    return whole if rest <= 0 else f"{whole[:limit]} … ({rest:,} more characters)"


def recipe(run: RunData) -> str:
    if not run.recipe_text:
        return ""
    return (
        '<section><h2>Recipe</h2><details class="card"><summary>recipe.yaml, as resolved</summary>'
        f"<pre>{escaped(run.recipe_text)}</pre></details></section>"
    )
