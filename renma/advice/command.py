"""`renma plan algorithm`: the ranked table, or JSON, and the YAML to paste."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from renma.advice.from_recipe import inputs_of, max_turns_of
from renma.advice.ranking import Advice, Candidate, advise, nested
from renma.advice.rules import OUT
from renma.advice.situation import INPUTS, flag, parameters, situation
from renma.errors import RecipeError
from renma.recipe_load import load_recipe
from renma.recipes import find_recipe

SHOWN = 5


def plan_algorithm(recipe: str | None, given: Mapping[str, Any], *, as_json: bool = False) -> Advice:
    """Print the advice. given: inputs of a `Situation` by name (None: not given; model_size as text), which override
    what the recipe says.

    Raises RecipeError for a recipe or a value that cannot be, and when no algorithm can learn from what there is.
    """
    size = given.get("model_size")
    asked = dict(given) | {"model_size": None if size is None else parameters(size)}
    read: dict[str, Any] = {}
    if recipe is not None:
        loaded = load_recipe(find_recipe(recipe))
        read = inputs_of(loaded, max_turns_of(loaded))
    found, assumed = situation(asked, read)
    advice = advise(found)
    if not advice.candidates:
        raise RecipeError(
            "no algorithm fits: without an environment to act in there must be --demonstrations, or pairs "
            "(--reward preference)"
        )
    if as_json:
        print(json.dumps(as_data(advice, assumed), ensure_ascii=False, indent=1))
    else:
        show(advice, assumed, Console())
    return advice


def as_data(advice: Advice, assumed: list[str]) -> dict[str, Any]:
    """The advice as plain values."""
    return {
        "situation": {name: getattr(advice.situation, name) for name in INPUTS},
        "assumed": assumed,
        "candidates": [_data(candidate) for candidate in advice.candidates],
        "ruled_out": [_data(candidate) for candidate in advice.ruled_out],
        "keys": nested(advice.keys),
        "why": advice.why,
        "notes": list(advice.notes),
    }


def _data(candidate: Candidate) -> dict[str, Any]:
    reasons = [
        {"input": r.input, "value": r.value, "points": r.points, "because": r.because, "source": r.source}
        for r in candidate.reasons
    ]
    return {"preset": candidate.preset, "score": candidate.score, "reasons": reasons}


def show(advice: Advice, assumed: list[str], console: Console) -> None:
    known = [f"{name} {advice.situation.shown(name)}" for name in INPUTS if name not in assumed]
    rest = [f"{flag(name)} {advice.situation.shown(name)}" for name in assumed]
    if known:
        console.print(f"known: {', '.join(known)}", markup=False, highlight=False)
    if rest:
        console.print(f"assumed: {', '.join(rest)}", style="dim", markup=False, highlight=False)
    table = Table(title="algorithms for this, best first", show_lines=True)
    table.add_column("preset", style="bold")
    table.add_column("points", justify="right")
    table.add_column("why")
    for candidate in advice.candidates[:SHOWN]:
        reasons = Text("\n").join(Text(reason.text) for reason in candidate.reasons)
        table.add_row(candidate.preset, str(candidate.score), reasons)
    console.print(table)
    if advice.ruled_out:
        by_reason: dict[str, list[str]] = {}
        for candidate in advice.ruled_out:
            by_reason.setdefault(next(r.because for r in candidate.reasons if r.points <= OUT), []).append(
                candidate.preset
            )
        for reason, presets in by_reason.items():
            console.print(f"ruled out: {reason}: {', '.join(presets)}", style="dim", markup=False, highlight=False)
    for note in advice.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    console.print("\nto paste into a recipe:", style="bold")
    console.print(advice.snippet, markup=False, highlight=False, soft_wrap=True)
