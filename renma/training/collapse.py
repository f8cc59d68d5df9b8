"""The collapse watch: says when a policy stops trying different things before it has learned the task.

RAGEN's "echo trap" (Wang et al. 2025, arXiv 2504.20073, section 4.2): the members of a group begin to do the same, the
std of their returns and the entropy fall, then the gradient norm jumps, and success does not come back. The same falls
are what learning looks like once everything is solved, so nothing is said while success still rises or is high.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from renma.types import Group

Kind = Literal["falls", "rises", "spikes"]


@dataclass(frozen=True, slots=True)
class Signal:
    """A metric and what is a collapse of it.

    falls: below `share` of its best window, both counted from `least` (the value that means no variety at all).
    rises: more than `share` above its lowest window. spikes: more than `share` times its usual value.
    A baseline within `noise` of `least` has nothing to fall from.
    """

    name: str
    kind: Kind
    share: float
    means: str
    remedy: str
    least: float = 0.0
    noise: float = 1e-3

    def past(self, value: float, baseline: float) -> bool:
        if self.kind == "rises":
            return value > baseline + self.share
        if baseline - self.least <= self.noise:
            return False
        if self.kind == "falls":
            return value - self.least < self.share * (baseline - self.least)
        return value > self.share * baseline


SIGNALS = (
    Signal(
        "return_std_within", "falls", 0.3, "the members of a group earn the same",
        "learn from groups that differ (algorithm.preset: starpo_s or dapo) or mix tasks of other difficulty",
    ),
    Signal(
        "learner/entropy", "falls", 0.25, "the policy hardly varies its tokens",
        "go back to a checkpoint of before and set algorithm.entropy, or clip higher (algorithm.preset: dapo)",
    ),
    Signal(
        "learner/grad_norm", "spikes", 5.0, "updates have become violent",
        "go back to a checkpoint of before and lower learner.learning_rate or learner.clip_norm",
    ),
    Signal(
        "repeated_actions_share", "rises", 0.3, "the agent repeats its own actions",
        "end episodes that loop, or penalise them (a reward of your own)",
    ),
    Signal(
        "distinct_first_actions", "falls", 0.3, "the members of a group open alike",
        "raise rollout.group_size, or sample some actions with older policies (rollout.cross_policy)", least=1.0,
        noise=0.25,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """One signal past its threshold: its baseline `then`, its value `now`, past it `since` this step without a break;
    what that means, and what to do."""

    name: str
    kind: Kind
    then: float
    now: float
    since: int
    means: str
    remedy: str

    @property
    def text(self) -> str:
        verb = {"falls": "fell", "rises": "rose", "spikes": "jumped"}[self.kind]
        return f"{self.name} {verb} from {self.then:.3g} to {self.now:.3g} since step {self.since}"


@dataclass(frozen=True, slots=True)
class CollapseWarning:
    """What the watch saw at `step`. success_then is the mean of an earlier window, success_now of the last one; None
    where the metrics have no success. `text` is one sentence for a person, `data` plain values for events.jsonl."""

    step: int
    signals: tuple[Change, ...]
    success_then: float | None
    success_now: float | None

    @property
    def since(self) -> int:
        return min(signal.since for signal in self.signals)

    @property
    def text(self) -> str:
        what = "; ".join(f"{change.text} ({change.means})" for change in self.signals)
        success = ""
        if self.success_then is not None and self.success_now is not None:
            success = f", while success went from {self.success_then:.0%} to {self.success_now:.0%}"
        remedies = dict.fromkeys(change.remedy for change in self.signals)
        return f"the policy may be collapsing: {what}{success}: {'; or '.join(remedies)}"

    @property
    def data(self) -> dict[str, Any]:
        return asdict(self) | {"since": self.since, "text": self.text}


@dataclass(slots=True)
class _Trace:
    """One signal's values so far. `past_since`: the first step of the present run past the threshold."""

    values: list[float] = field(default_factory=list)
    baseline: float | None = None
    past_since: int | None = None
    past_steps: int = 0
    warned: bool = False


@dataclass(slots=True)
class CollapseWatch:
    """Feed it each training step's metrics, in order; it answers with a warning when there is something new to say.

    window: steps whose median is a baseline, and whose mean is the success of a time. patience: steps in a row that a
    signal must be past its threshold. solved: from this success on, falls are the task running out, not a collapse.
    rising: success this much above what it was `memory` steps earlier is still rising.

    A baseline follows a signal while it is healthy (the best window of a signal that falls, the lowest of one that
    rises, the median of all of one that spikes), and stands still while it is past. A signal is warned of once, and
    again only after it has recovered. The state is a function of the metrics fed: `replay` gives it back on resume.
    """

    window: int = 5
    patience: int = 5
    solved: float = 0.9
    rising: float = 0.02
    memory: int = 20
    signals: tuple[Signal, ...] = SIGNALS
    _traces: dict[str, _Trace] = field(default_factory=dict)
    _success: list[float] = field(default_factory=list)

    @classmethod
    def replay(cls, lines: Iterable[Mapping[str, Any]], **options: Any) -> CollapseWatch:
        """The watch as it was after these lines of metrics.jsonl (those of other phases than `train` are skipped)."""
        watch = cls(**options)
        for line in lines:
            if line.get("phase", "train") == "train":
                watch.feed(int(line["step"]), line)
        return watch

    def feed(self, step: int, metrics: Mapping[str, Any]) -> CollapseWarning | None:
        """One step's metrics. A number that is missing or not finite (null in metrics.jsonl) says nothing."""
        success = _finite(metrics.get("success"))
        if success is not None:
            self._success.append(success)
        for signal in self.signals:
            value = _finite(metrics.get(signal.name))
            if value is not None:
                self._follow(signal, self._traces.setdefault(signal.name, _Trace()), step, value)
        lasting = [
            (signal, trace)
            for signal in self.signals
            if (trace := self._traces.get(signal.name)) is not None and trace.past_steps >= self.patience
        ]
        if self._healthy() or all(trace.warned for _, trace in lasting):
            return None
        for _, trace in lasting:
            trace.warned = True
        then, now = self._success_then_and_now()
        return CollapseWarning(step, tuple(_change(signal, trace) for signal, trace in lasting), then, now)

    def _follow(self, signal: Signal, trace: _Trace, step: int, value: float) -> None:
        trace.values.append(value)
        if trace.baseline is not None and signal.past(value, trace.baseline):
            trace.past_since = step if trace.past_since is None else trace.past_since
            trace.past_steps += 1
            return
        trace.past_since, trace.past_steps, trace.warned = None, 0, False
        if len(trace.values) < self.window:
            return
        if signal.kind == "spikes":
            trace.baseline = statistics.median(trace.values)
            return
        recent = statistics.median(trace.values[-self.window :])
        better = max if signal.kind == "falls" else min
        trace.baseline = recent if trace.baseline is None else better(trace.baseline, recent)

    def _success_then_and_now(self) -> tuple[float | None, float | None]:
        if not self._success:
            return None, None
        now = statistics.fmean(self._success[-self.window :])
        end = max(len(self._success) - self.memory, self.window)
        return statistics.fmean(self._success[max(0, end - self.window) : end]), now

    def _healthy(self) -> bool:
        """Whether success excuses a loss of variety: the tasks are solved, or it still rises."""
        then, now = self._success_then_and_now()
        if then is None or now is None:
            return False
        return now >= self.solved or now >= then + self.rising


def _change(signal: Signal, trace: _Trace) -> Change:
    assert trace.baseline is not None and trace.past_since is not None
    then, now = trace.baseline, trace.values[-1]
    return Change(signal.name, signal.kind, then, now, trace.past_since, signal.means, signal.remedy)


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def repeated_actions_share(groups: Sequence[Group]) -> float:
    """The share of actions, of all trainable trajectories, that repeat an earlier action of their own trajectory word
    for word; 0 where there are no actions."""
    total = repeated = 0
    for group in groups:
        for trajectory in group.trainable:
            actions = [step.action.raw for step in trajectory.steps]
            total += len(actions)
            repeated += len(actions) - len(set(actions))
    return repeated / total if total else 0.0
