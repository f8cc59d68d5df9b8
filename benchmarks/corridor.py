"""A corridor of locked doors: a long-horizon task whose only reward comes at its end, for comparing kinds of credit.

    6k          six doors are left; the next one's sign is k
    dig         the policy's verb, three letters and a newline: four tokens
    6k          the wrong verb (or the lock stuck): still the same door
    hit
    5c          the right one: the next door

Each sign is opened by one of four verbs, the same in all tasks, and nothing says which. A corridor of H doors has to be
walked in `turns(H)` tries; the reward is 1 at its end if it was, else 0. What is seen at a door is the same however
often one stands before it, so that a group meets the same states again (`state_key`); how many tries are left is not
shown. A lock sticks with probability `STUCK` a try, by the task's own draws, the same for every member of its group.
"""

from __future__ import annotations

import random

from renma.environments.base import Environment
from renma.errors import RecipeError
from renma.seeding import seed_for
from renma.tasks.base import checked_index
from renma.types import Action, Observation, StepResult, Task

VERBS = ("hit", "hug", "dig", "dip")  # two and two begin alike: which token decides differs from pair to pair
SIGNS = "abcdefghijkl"
RULE = {sign: VERBS[seed_for("corridor rule", sign) % len(VERBS)] for sign in SIGNS}
STUCK = 0.1
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def turns(doors: int) -> int:
    """How many tries a corridor of so many doors allows: three for every two doors."""
    return doors + doors // 2


class CorridorTasks:
    """Corridors with signs at random; `doors` are the lengths, taken in turn. Task i depends on (seed, length, i)."""

    def __init__(self, *, doors: list[int] | None = None, size: int = 99_999, seed: int = 0) -> None:
        self.doors, self.size, self.seed = doors or [4], size, seed
        if not all(1 <= count < len(DIGITS) for count in self.doors):
            raise RecipeError(f"tasks.doors must be from 1 to {len(DIGITS) - 1}, got {doors}")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        doors = self.doors[checked_index(index, self.size) % len(self.doors)]
        rng = random.Random(seed_for("corridor", self.seed, doors, index))
        signs = "".join(rng.choice(SIGNS) for _ in range(doors))
        stuck = tuple(rng.random() < STUCK for _ in range(turns(doors)))
        return Task(f"{doors}-{index}", seen(signs, 0), data={"signs": signs, "stuck": stuck}, family="corridor")


def seen(signs: str, passed: int) -> str:
    """What a door shows: how many doors are left and its sign."""
    return DIGITS[len(signs) - passed] + (signs[passed] if passed < len(signs) else ".")


class Corridor(Environment):
    """Methods are coroutines so that the loop calls them itself, without a thread."""

    max_turns = turns(len(DIGITS))

    async def reset(self, task: Task) -> str:
        self._signs: str = task.data["signs"]
        self._stuck: tuple[bool, ...] = task.data["stuck"]
        self._passed = self._tried = 0
        return seen(self._signs, 0)

    async def step(self, action: Action) -> StepResult:
        opens = action.raw.strip() == RULE[self._signs[self._passed]] and not self._stuck[self._tried]
        self._tried += 1
        self._passed += opens
        solved = self._passed == len(self._signs)
        over = solved or self._tried == len(self._stuck)
        shown = Observation.of(seen(self._signs, self._passed))
        return StepResult(shown, float(solved), terminated=over, info={"success": solved})

    async def state_key(self) -> str:  # type: ignore[override]
        return seen(self._signs, self._passed)


class CorridorDemonstrator:
    """Knows some signs: there it writes the right verb with probability `skill`, else, and elsewhere, any of the four.

    known: how many of the signs it knows, the first ones of `SIGNS`.
    """

    def __init__(self, *, known: int = 8, skill: float = 0.65) -> None:
        self.known, self.skill = known, skill

    def write(self, task: Task, turn: int, observation: Observation, rng: random.Random) -> str:
        sign = observation.messages[-1].text[-1]
        informed, guess = rng.random() < self.skill, rng.choice(VERBS)
        return (RULE[sign] if informed and sign in SIGNS[: self.known] else guess) + "\n"
