"""One episode: an agent and a fresh environment, turn by turn, into a Trajectory.

What fails is part of the result: an environment that raises is tried again with a fresh one and the same seeds, then
the trajectory is `failed`, with the error's text; it is never a zero reward.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from renma.agents.base import Agent, ContextFull
from renma.environments.base import Environment, as_observation
from renma.environments.tool_environment import ToolEnvironment
from renma.errors import RenmaError
from renma.profiling import interval
from renma.rollout.threads import call, may_block
from renma.types import Ids, Observation, Status, Step, StepResult, StopReason, Task, Trajectory

AgentMaker = Callable[[Task, int, list[dict[str, Any]]], Agent]
"""(task, attempt's member, the environment's tools) -> a fresh agent."""


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """How long an episode may be and how often it is tried. `max_turns` None: the environment's own."""

    max_turns: int | None = None
    retries: int = 2
    seconds: float | None = None


@runtime_checkable
class LooksAhead(Protocol):
    """An agent that can say which prompt it would send for an observation, without sending it."""

    def next_prompt(self, observation: Observation) -> list[int]: ...


@dataclass(slots=True)
class _Record:
    """What has happened so far in one attempt. next_prompt: where a limit cut it, what the policy would have seen."""

    steps: list[Step] = field(default_factory=list)
    success: bool | None = None
    next_prompt: Ids | None = None


# Methods that an environment left as they are need no thread.
OURS = (Environment.state_key, Environment.close, ToolEnvironment.reset)


class EnvironmentFailed(Exception):
    """The environment raised; the cause is chained."""


class EngineFailed(Exception):
    """The engine raised; the cause is chained."""


async def run_episode(
    task: Task,
    member: int,
    make_environment: Callable[[], Environment],
    make_agent: AgentMaker,
    rules: EpisodeRules,
    *,
    seed: int = 0,
) -> Trajectory:
    """Run one episode to its end. Raises only what is not the episode's own failure (an interrupt, a cancellation)."""
    started = time.perf_counter()
    error, attempt, record = "", 0, _Record()
    reason: StopReason = "environment_error"
    for attempt in range(1, rules.retries + 2):
        record = _Record()
        try:
            async with asyncio.timeout(rules.seconds):
                status, reason = await _attempt(record, task, member, make_environment, make_agent, rules)
        except EnvironmentFailed as failure:
            error, reason = describe(failure.__cause__), "environment_error"
            continue
        except EngineFailed as failure:
            error, reason = describe(failure.__cause__), "engine_error"
            break
        except TimeoutError:
            error, reason = f"the episode took longer than {rules.seconds} s", "time"
            break
        return Trajectory(
            task=task,
            member=member,
            steps=tuple(record.steps),
            status=status,
            stop_reason=reason,
            success=record.success,
            seed=seed,
            attempts=attempt,
            next_prompt_ids=record.next_prompt,
            seconds=time.perf_counter() - started,
        )
    return Trajectory(
        task=task,
        member=member,
        steps=tuple(record.steps),
        status="failed",
        stop_reason=reason,
        seed=seed,
        error=error,
        attempts=attempt,
        seconds=time.perf_counter() - started,
    )


async def _attempt(
    record: _Record,
    task: Task,
    member: int,
    make_environment: Callable[[], Environment],
    make_agent: AgentMaker,
    rules: EpisodeRules,
) -> tuple[Status, StopReason]:
    environment = await _environment(make_environment)
    try:
        ending = await _turns(record, task, member, environment, make_agent, rules)
    except BaseException as failure:
        try:
            await _environment(environment.close)
        except EnvironmentFailed as second:  # must not hide what ended the episode
            failure.add_note(f"closing the environment failed too: {describe(second.__cause__)}")
        raise
    await _environment(environment.close)
    return ending


async def _turns(
    record: _Record, task: Task, member: int, environment: Environment, make_agent: AgentMaker, rules: EpisodeRules
) -> tuple[Status, StopReason]:
    observation = as_observation(await _environment(environment.reset, task))
    agent = make_agent(task, member, environment.tools)
    limit = rules.max_turns or environment.max_turns
    for turn in range(limit):
        started = time.perf_counter()
        try:
            act = await agent.act(observation)
        except ContextFull:
            record.success = bool(record.success)
            record.next_prompt = _next_prompt(agent, observation)
            return "truncated", "context"
        except RenmaError:
            raise
        except Exception as failure:
            raise EngineFailed from failure
        if act.sample.stop_reason == "aborted":
            raise EngineFailed from RuntimeError("the engine aborted the request")
        acted = time.perf_counter()
        key = await _environment(environment.state_key)
        result = await _environment(environment.step, act.action)
        if not isinstance(result, StepResult):
            raise EnvironmentFailed from TypeError(
                f"{type(environment).__name__}.step returned {type(result).__name__}; return a StepResult"
            )
        observation = as_observation(result.observation)
        over = result.terminated or result.truncated
        record.steps.append(
            Step(
                prompt_ids=act.prompt_ids,
                action_ids=act.sample.ids,
                logprobs=act.sample.logprobs,
                versions=act.sample.versions,
                action=act.action,
                observation=observation,
                reward=_components(result.reward),
                terminated=result.terminated,
                truncated=result.truncated or (turn == limit - 1 and not over),
                sample_stop=act.sample.stop_reason,
                state_key=key,
                routing=act.sample.routing,
                seconds={"act": acted - started, "environment": time.perf_counter() - acted},
            )
        )
        if "success" in result.info:
            record.success = bool(result.info["success"])
        if over:
            return _ending(record, result, agent, observation)
    record.success = bool(record.success)
    record.next_prompt = _next_prompt(agent, observation)
    return "truncated", "step_limit"


def _ending(record: _Record, result: StepResult, agent: Agent, observation: Observation) -> tuple[Status, StopReason]:
    """An environment that ended the episode: by truncation, by an action cut at its length, or by an answer."""
    last = record.steps[-1]
    if result.truncated and not result.terminated:
        record.success = bool(record.success)
        record.next_prompt = _next_prompt(agent, observation)
        return "truncated", "step_limit"
    if last.sample_stop == "length" and not record.success:
        # Without the limit the policy would have gone on writing: what it saw next is its own action.
        record.next_prompt = np.concatenate([last.prompt_ids, last.action_ids])
        return "truncated", "length"
    return "done", "stop" if result.info.get("stop") == "stop" else "answer"


def _next_prompt(agent: Agent, observation: Observation) -> Ids | None:
    """[P] int32 the prompt of the turn that did not come; None for an agent that cannot tell."""
    if not isinstance(agent, LooksAhead):
        return None
    try:
        return np.asarray(agent.next_prompt(observation), dtype=np.int32)
    except RenmaError:
        raise
    except Exception as failure:  # as where it acts: rendering is the agent's part
        raise EngineFailed from failure


async def _environment(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the user's code: async awaited, plain in a thread; what it raises becomes EnvironmentFailed."""
    try:
        with interval("environment"):
            if getattr(function, "__func__", None) in OURS or not may_block(function):
                value = function(*arguments)
            else:
                value = await call(function, *arguments)
            return await value if inspect.isawaitable(value) else value
    except (asyncio.CancelledError, TimeoutError):
        raise
    except Exception as failure:
        raise EnvironmentFailed from failure


def _components(reward: Any) -> dict[str, float]:
    """A reward as named components; a bare number is the component 'reward'."""
    if isinstance(reward, int | float):
        return {"reward": float(reward)} if reward else {}
    return {str(name): float(value) for name, value in reward.items()}


def describe(error: BaseException | None) -> str:
    """The kind and first line of an error, for counts and logs."""
    first = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
