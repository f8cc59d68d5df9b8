"""The vocabulary of Renma, on one page.

A `Task` is attempted by an agent in an environment. Each turn is a `Step`: the exact token ids the policy saw and the
exact ids it sampled, with their log-probabilities and policy versions, the parsed `Action`, the next `Observation` and
the reward. Steps make a `Trajectory`; the trajectories of one task make a `Group`.

Three things are kept apart everywhere: a trajectory's `status` (did the episode run as it should), its `stop_reason`
(what ended it) and its `success` (did it solve the task).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Role = Literal["system", "user", "assistant", "tool"]
Status = Literal["done", "truncated", "failed"]
StopReason = Literal[
    "answer",  # the agent gave its final answer, or the environment reached a terminal state
    "stop",  # the policy stopped without an answer that the environment could take
    "step_limit",  # the episode used all its turns
    "context",  # the next prompt would not have fitted the model's context
    "length",  # one action used all its tokens
    "time",  # the episode or a turn ran out of time
    "environment_error",  # the environment raised, again after every retry
    "engine_error",  # the engine raised or aborted
    "reward_error",  # a reward raised, or every reward abstained
    "aborted",  # the episode was withdrawn
]
SampleStop = Literal["stop", "length", "aborted"]

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Routing = NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to solve. `id` is unique within its `family`; `prompt` and `answer` mean what the environment says."""

    id: str
    prompt: str
    answer: Any = None
    family: str = "default"
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the policy wrote. `error` is set when it could not be parsed: the agent is told, nothing is run."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message in the OpenAI chat schema. `content` is text or a sequence of content parts (text, image_url)."""

    role: Role
    content: str | Sequence[Mapping[str, Any]] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The text of the message, image parts left out."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text", "")) for part in self.content if part.get("type") == "text")


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent is newly shown: only the new messages, never the history."""

    messages: tuple[Message, ...] = ()

    @staticmethod
    def of(text: str, role: Role = "user") -> Observation:
        return Observation((Message(role, text),))


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy wrote, parsed: its text (calls and thinking taken out) and its tool calls in order.

    `raw` is the decoded action as written, for display and logs; nothing is ever encoded again from it.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    thinking: str = ""
    raw: str = ""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment answers to an action. `reward` is a number or named components, which are summed.

    `info["success"]` (bool), where given, says whether the task is solved; it is apart from `terminated`.
    """

    observation: Observation | str = field(default_factory=Observation)
    reward: float | Mapping[str, float] = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """One turn, with exact tokens.

    prompt_ids [P] int32: exactly what the policy saw. action_ids [A] int32: exactly what it sampled, the stop token
    included when it was sampled. logprobs [A] float32: log softmax(logits / temperature) at each sampled id.
    versions [A] int32: the policy version that sampled each token.
    routing [P + A, layers, k] int16: the experts a mixture-of-experts policy chose at each position when it sampled
    (-1 at the last, whose choice nothing depended on); None for a dense policy or when they are not recorded.
    state_key: equal for equal states, read before the action (anchor states); None where the environment has none.
    """

    prompt_ids: Ids
    action_ids: Ids
    logprobs: Floats
    versions: Ids
    action: Action
    observation: Observation = field(default_factory=Observation)
    reward: Mapping[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    sample_stop: SampleStop = "stop"
    agent: str = "agent"
    policy: str = "policy"
    state_key: str | None = None
    routing: Routing | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = {len(self.action_ids), len(self.logprobs), len(self.versions)}
        if len(sizes) != 1:
            raise ValueError(
                f"a step needs one log-probability and one version for each sampled token; got "
                f"{len(self.action_ids)} ids, {len(self.logprobs)} logprobs, {len(self.versions)} versions"
            )

    def goes_on_from(self, earlier: Step) -> bool:
        """Whether the prompt begins with all of an earlier step: its prompt and its action."""
        kept, said, seen = earlier.prompt_ids, earlier.action_ids, self.prompt_ids
        start, end = len(kept), len(kept) + len(said)
        if len(seen) < end or not np.array_equal(seen[start:end], said):
            return False
        # Prompts that grow on one tape (tape.py) share their memory: a long episode is not compared turn by turn.
        shared = seen.ctypes.data == kept.ctypes.data and (seen.dtype, seen.strides) == (kept.dtype, kept.strides)
        return shared or bool(np.array_equal(seen[:start], kept))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One attempt at a task. `rewards` holds the weighted outcome components; `ret` adds every step's reward.

    next_prompt_ids [P] int32: what the policy would have seen next, where a limit cut the episode (status
    "truncated"): a critic's value there stands for the rewards that did not come. None where there is no such prompt.
    """

    task: Task
    member: int
    steps: tuple[Step, ...]
    status: Status
    stop_reason: StopReason
    success: bool | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    error: str | None = None
    attempts: int = 1
    next_prompt_ids: Ids | None = None
    seconds: float = 0.0
    reward_seconds: float = 0.0

    @property
    def step_rewards(self) -> list[float]:
        """[K] the reward of each step; the outcome's is on the last."""
        values = [float(sum(step.reward.values())) for step in self.steps]
        if values:
            values[-1] += float(sum(self.rewards.values()))
        return values

    @property
    def ret(self) -> float:
        """R, the undiscounted return."""
        return float(sum(self.rewards.values())) + sum(float(sum(s.reward.values())) for s in self.steps)

    @property
    def solved(self) -> bool:
        """Whether the attempt solved its task: what the environment said, else a return of more than 0.5."""
        return self.success if self.success is not None else self.ret > 0.5

    @property
    def sampled_tokens(self) -> int:
        return sum(len(step.action_ids) for step in self.steps)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the sampled tokens; staleness = current version - this."""
        return min((int(step.versions.min()) for step in self.steps if len(step.versions)), default=0)

    @property
    def trainable(self) -> bool:
        return self.status != "failed" and any(len(step.action_ids) for step in self.steps)


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one task, members in order. Failed members are kept for the record, never in statistics."""

    task: Task
    trajectories: tuple[Trajectory, ...]

    @property
    def trainable(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if t.trainable)
