"""Which algorithm for which situation: the field's table, its reasons, and a snippet that loads."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from renma.advice import RULES, Situation, advise
from renma.advice.command import as_data, plan_algorithm, show
from renma.advice.from_recipe import inputs_of
from renma.advice.ranking import nested
from renma.advice.rules import CLIPPED, CRITIC, GROUP, OUT, RECORDED, SAMPLING
from renma.advice.situation import INPUTS, parameters, situation
from renma.errors import RecipeError
from renma.recipe_checks import check_recipe
from renma.recipe_load import load_recipe
from renma.training.algorithms import PRESETS, preset, resolve
from tests.end_to_end.tiny import TINY

NAMED = {name for rule in RULES for name in rule.effect} | {n for rule in RULES for n in rule.keys_for or ()}

SITUATIONS = st.builds(
    Situation,
    horizon=st.integers(1, 60),
    reward=st.sampled_from(["sparse", "dense", "process", "preference"]),
    verifiable=st.booleans(),
    group_size=st.integers(1, 8),
    model_size=st.sampled_from([None, 1e6, 7e9]),
    memory=st.sampled_from([None, 80.0]),
    tokens=st.sampled_from([None, 100, 20000]),
    steps=st.sampled_from(["implicit", "explicit"]),
    repeated_states=st.booleans(),
    staleness=st.integers(0, 3),
    moe=st.booleans(),
    teacher=st.booleans(),
    success=st.sampled_from([None, 0.0, 0.01, 0.07, 0.5, 0.95]),
    demonstrations=st.booleans(),
    online=st.booleans(),
    families=st.integers(1, 3),
)


def best(**inputs: Any) -> str:
    return advise(Situation(**inputs)).candidates[0].preset


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        ({}, "grpo"),
        ({"horizon": 1}, "grpo"),
        ({"horizon": 20}, "grpo"),
        ({"horizon": 21}, "ppo"),
        ({"horizon": 30, "reward": "dense"}, "ppo"),
        ({"tokens": 16000}, "dapo"),
        ({"steps": "explicit"}, "steppo"),
        ({"steps": "explicit", "horizon": 40}, "steppo"),
        ({"repeated_states": True}, "gigpo"),
        ({"reward": "preference", "verifiable": False}, "ppo"),
        ({"reward": "preference", "verifiable": False, "online": False}, "multi_turn_dpo"),
        ({"reward": "preference", "verifiable": False, "online": False, "horizon": 1}, "dpo"),
        ({"reward": "preference", "online": False, "steps": "explicit"}, "step_dpo"),
        ({"staleness": 4}, "decoupled_ppo"),
        ({"moe": True}, "gspo"),
        ({"horizon": 30, "model_size": 7e9, "memory": 80.0}, "grpo"),
        ({"horizon": 30, "model_size": 1e9, "memory": 80.0}, "ppo"),
        ({"teacher": True}, "distillation"),
        ({"success": 0.01, "demonstrations": True}, "sft"),
        ({"success": 0.01}, "rft"),
        ({"group_size": 1}, "reinforce_pp"),
        ({"group_size": 2, "horizon": 5}, "rloo"),
        ({"online": False, "demonstrations": True}, "sft"),
    ],
)
def test_the_field_s_decision_table(inputs: dict[str, Any], wanted: str) -> None:
    assert best(**inputs) == wanted


def test_every_named_preset_exists_and_what_is_said_of_it_is_true() -> None:
    assert set(PRESETS) >= NAMED
    for name in PRESETS:
        algorithm = preset(name)
        assert (algorithm.min_group_size > 1) == (name in GROUP), name
        assert ("values" in algorithm.needs) == (name in CRITIC), name
    assert set(PRESETS) == SAMPLING | RECORDED and not SAMPLING & RECORDED and CLIPPED < SAMPLING


@given(SITUATIONS)
@settings(max_examples=100, deadline=None)
def test_every_situation_has_an_answer_with_its_reasons(found: Situation) -> None:
    advice = advise(found)
    scores = [candidate.score for candidate in advice.candidates]
    assert scores == sorted(scores, reverse=True)
    assert advice.candidates or not found.online, "whoever can act can learn"
    for candidate in advice.candidates:
        assert candidate.score == sum(reason.points for reason in candidate.reasons) > 0
        for reason in candidate.reasons:
            assert reason.input in INPUTS and reason.value == found.shown(reason.input)
            assert reason.because and reason.source and "{s" not in reason.text
    out = {candidate.preset for candidate in advice.ruled_out}
    assert out.isdisjoint(candidate.preset for candidate in advice.candidates)
    assert all(any(reason.points <= OUT for reason in candidate.reasons) for candidate in advice.ruled_out)
    assert not any("{s" in note for note in advice.notes)


@given(SITUATIONS)
@settings(max_examples=40, deadline=None)
def test_a_snippet_makes_a_recipe_that_passes_its_checks(found: Situation) -> None:
    """Each candidate's, in a recipe whose group size and demonstrator are those of the situation."""
    for candidate in advise(found).candidates:
        advice = advise(found, candidate.preset)
        assert yaml.safe_load(advice.snippet) == nested(advice.keys)
        tree: dict[str, Any] = copy.deepcopy(TINY)
        tree["rollout"]["group_size"] = found.group_size
        for section, values in yaml.safe_load(advice.snippet).items():
            tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
        recipe = load_recipe(tree)
        check_recipe(recipe)
        assert resolve(recipe.algorithm).name == candidate.preset
        assert recipe.training.staleness == (found.staleness if candidate.preset in SAMPLING else 0)


def test_each_rule_speaks_somewhere_and_says_who_says_so() -> None:
    assert all(rule.because and rule.source and set(rule.inputs) <= set(INPUTS) for rule in RULES)
    assert all(rule.effect or rule.keys or rule.note or not rule.keys_for for rule in RULES)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"horizon": 0}, "--horizon 0 .* 1 or more"),
        ({"group_size": -1}, "--group-size -1"),
        ({"reward": "sparce"}, "did you mean 'sparse'"),
        ({"steps": "some"}, "known: explicit, implicit"),
        ({"success": 30}, "--success 30 .* 0 to 1"),
        ({"staleness": -1}, "--staleness -1 .* 0 or more"),
        ({"memory": 0.0}, "--memory 0"),
    ],
)
def test_inputs_that_cannot_be(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        Situation(**inputs)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("text", "number"), [("270M", 270e6), ("1.5b", 1.5e9), ("600000", 6e5), (" 7 B ", 7e9)])
def test_model_sizes(text: str, number: float) -> None:
    assert parameters(text) == number


@pytest.mark.parametrize("text", ["big", "7X", "-1B", "", "1e9999999999B"])
def test_what_is_no_model_size(text: str) -> None:
    with pytest.raises(RecipeError, match="no size"):
        parameters(text)


def test_a_recipe_says_what_it_can() -> None:
    tree = {
        **TINY,
        "rollout": {"group_size": 4, "tasks_per_step": 4, "slots": 8},
        "training": {"steps": 2, "staleness": 3},
        "rewards": [{"type": "process_reward_model"}, {"type": "format"}],
        "teacher": {"source": "somewhere"},
        "tasks": {"type": "mixture", "sources": [{"type": "arithmetic"}, {"type": "arithmetic"}]},
    }
    inputs = inputs_of(load_recipe(tree), max_turns=4)
    found, assumed = situation({"horizon": 50, "moe": None}, inputs)
    assert (found.horizon, found.group_size, found.staleness, found.families) == (50, 4, 3, 2)
    assert (found.reward, found.verifiable, found.teacher, found.demonstrations) == ("process", False, True, True)
    assert found.tokens == 4 * 16
    assert "moe" in assumed and "horizon" not in assumed
    # 1 layer of 4 x 32 x 32 attention and 3 x 32 x 64 feed-forward, 320 x 32 embeddings
    assert found.model_size == 4 * 32 * 32 + 3 * 32 * 64 + 320 * 32
    assert inputs_of(load_recipe({**TINY, "rewards": []}), 4).get("verifiable") is None
    trained = {**TINY, "rewards": [{"type": "reward_model"}], "reward_model": {}}
    found, _ = situation(inputs_of(load_recipe(trained), 4))
    assert (found.reward, found.verifiable, found.online) == ("preference", False, True)


def test_the_plan_of_a_recipe_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    advice = plan_algorithm("quickstart", {"moe": True, "model_size": "3B", "memory": 40.0})
    shown = capsys.readouterr().out
    assert "horizon 6" in shown and "gspo" in shown
    assert "moe yes" in shown and "router replay" in shown
    pasted = shown.split("to paste into a recipe:")[1]
    assert yaml.safe_load(pasted) == nested(advice.keys)
    assert advice.situation.tight


def test_the_table_and_the_data_say_the_same() -> None:
    advice = advise(Situation(horizon=30, staleness=2, group_size=1))
    data = as_data(advice, ["moe"])
    screen = io.StringIO()
    show(advice, ["moe"], Console(file=screen, width=200))
    for candidate in data["candidates"][:5]:
        assert candidate["preset"] in screen.getvalue()
    assert {c["preset"] for c in data["ruled_out"]} == {c.preset for c in advice.ruled_out} >= {"grpo", "on_policy"}
    assert "a group of one" in screen.getvalue()
    assert data["keys"]["training"]["staleness"] == 2
