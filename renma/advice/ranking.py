"""From a situation to ranked presets with their reasons, and to the recipe keys that go with the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from renma.advice.rules import OUT, RULES, Rule
from renma.advice.situation import Situation


@dataclass(frozen=True, slots=True)
class Reason:
    """One rule that moved a preset: by how much, through which input, with what value, and why."""

    input: str
    value: str
    points: int
    because: str
    source: str

    @property
    def text(self) -> str:
        moved = "ruled out" if self.points <= OUT else f"{self.points:+d}"
        return f"{moved}: {self.input} {self.value}: {self.because} [{self.source}]"


@dataclass(frozen=True, slots=True)
class Candidate:
    preset: str
    score: int
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    """candidates: best first, those with more for them than against. ruled_out: those that cannot work, each with why.

    keys: recipe keys to set, dotted; why: the reasons for some of them. notes: what else follows, as text.
    """

    situation: Situation
    candidates: tuple[Candidate, ...]
    ruled_out: tuple[Candidate, ...]
    keys: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def snippet(self) -> str:
        """The keys as YAML, to be pasted into a recipe, under comments that say what they are for."""
        keys_by_reason: dict[str, list[str]] = {}
        for key, reason in self.why.items():
            keys_by_reason.setdefault(reason, []).append(key)
        comments = "".join(f"# {', '.join(keys)}: {reason}\n" for reason, keys in keys_by_reason.items())
        return comments + yaml.safe_dump(nested(self.keys), sort_keys=False, allow_unicode=True)


def advise(situation: Situation, preset: str | None = None, rules: Sequence[Rule] = RULES) -> Advice:
    """Apply the rules. preset: the one whose keys are wanted; None: the first candidate's.

    Equal scores stand in the order in which the rules first name them.
    """
    fired = [rule for rule in rules if rule.when(situation)]
    order = dict.fromkeys(name for rule in rules for name in rule.effect)
    everyone = [_candidate(name, fired, situation) for name in order]
    able = sorted((c for c in everyone if c.score > 0), key=lambda c: -c.score)
    ruled_out = tuple(c for c in everyone if any(reason.points <= OUT for reason in c.reasons))
    chosen = preset or (able[0].preset if able else None)
    notes = [_text(rule.note, situation) for rule in fired if rule.note and _concerns(rule, chosen, able)]
    notes += [
        f"{_text(rule.because, situation)} [{rule.source}]" for rule in fired if not rule.effect and not rule.keys
    ]
    keys: dict[str, Any] = {} if chosen is None else {"algorithm.preset": chosen}
    why: dict[str, str] = {}
    for rule in fired:
        if chosen is not None and _goes_with(rule, chosen):
            keys |= {key: _value(value, situation) for key, value in rule.keys.items()}
            why |= dict.fromkeys(rule.keys, f"{_text(rule.because, situation)} [{rule.source}]")
    return Advice(situation, tuple(able), ruled_out, keys, why, tuple(dict.fromkeys(notes)))


def _goes_with(rule: Rule, preset: str) -> bool:
    """Whether a rule's keys belong to this preset."""
    if rule.keys_for is not None:
        return preset in rule.keys_for
    return not rule.effect or rule.effect.get(preset, 0) > 0


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as a tree."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        node = tree
        *sections, leaf = key.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return tree


def _candidate(name: str, fired: Sequence[Rule], situation: Situation) -> Candidate:
    reasons = tuple(
        Reason(
            rule.inputs[0],
            situation.shown(rule.inputs[0]),
            rule.effect[name],
            _text(rule.because, situation),
            rule.source,
        )
        for rule in fired
        if rule.effect.get(name)
    )
    return Candidate(name, sum(reason.points for reason in reasons), reasons)


def _concerns(rule: Rule, chosen: str | None, able: Sequence[Candidate]) -> bool:
    """A note is given with what it is about: the chosen preset or the runner-up, or whatever is chosen."""
    if not rule.effect:
        return True
    return any(rule.effect.get(name, 0) > 0 for name in {chosen, *(c.preset for c in able[:2])} if name is not None)


def _text(text: str, situation: Situation) -> str:
    return text.format(s=situation)


def _value(value: Any, situation: Situation) -> Any:
    """A key's value; text in braces is an input, with its type."""
    if isinstance(value, str) and value.startswith("{s."):
        return getattr(situation, value[3:-1])
    return value
