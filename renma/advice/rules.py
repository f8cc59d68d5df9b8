"""The decision table: when what is known of a situation speaks for or against a preset, why, and by whose account.

Points only order the candidates: 3 is the ordinary reason to take an algorithm, 6 one that outweighs the length of the
episodes, OUT one that rules it out. A rule without effect gives keys or a note to whatever is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from renma.advice.situation import Situation

OUT = -100
LONG_HORIZON = 20  # actions
SEVERAL = 5  # actions
LONG_TRAJECTORY = 4096  # sampled tokens
RARE, EASY = 0.05, 0.8  # shares of success

CRITIC = frozenset({"ppo", "steppo"})
RECORDED = frozenset({"dpo", "multi_turn_dpo", "step_dpo", "sft"})
GROUP = frozenset({
    "rloo", "grpo", "grpo_mean", "dr_grpo", "dapo", "gspo", "cispo", "gigpo", "starpo_s", "decoupled_ppo", "on_policy",
    "reinforce_pp_baseline", "sft_rl", "dpo", "multi_turn_dpo", "step_dpo",
})  # fmt: skip
CLIPPED = frozenset({
    "reinforce_pp", "reinforce_pp_baseline", "ppo", "steppo", "grpo", "grpo_mean", "dr_grpo", "dapo", "gspo", "cispo",
    "gigpo", "starpo_s",
})  # fmt: skip
SAMPLING = CLIPPED | {"reinforce", "rloo", "remax", "decoupled_ppo", "on_policy", "rft", "sft_rl", "distillation"}


@dataclass(frozen=True, slots=True)
class Rule:
    """inputs: what it looks at, the first being what it is about. because: a sentence; {s} is the situation.

    effect: points by preset. keys: recipe keys that go with a chosen preset of `keys_for` (None: with any that the
    rule favours, or any at all where it has no effect). note: what to know besides. source: whose experience it is.
    """

    inputs: tuple[str, ...]
    when: Callable[[Situation], bool]
    because: str
    source: str
    effect: Mapping[str, int] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    keys_for: frozenset[str] | None = None
    note: str = ""


def points(**presets: int) -> dict[str, int]:
    return presets


def out(presets: frozenset[str]) -> dict[str, int]:
    return dict.fromkeys(sorted(presets), OUT)


RULES: tuple[Rule, ...] = (
    # ---- how long an episode is, and where its credit lies
    Rule(
        ("horizon",), lambda s: s.horizon <= LONG_HORIZON,
        "within about 20 actions the episode's return still says enough about each: compare the group's members",
        "Shao et al. 2024 (DeepSeekMath)",
        points(grpo=3),
    ),
    Rule(
        ("horizon",), lambda s: s.horizon <= LONG_HORIZON,
        "as grpo, without its std, which favours tasks that are nearly solved or nearly hopeless",
        "Liu et al. 2025 (Dr. GRPO)",
        points(dr_grpo=2, grpo_mean=2),
    ),
    Rule(
        ("horizon",), lambda s: s.horizon <= LONG_HORIZON,
        "each attempt against the mean of the others: unbiased, and no clip to set",
        "Ahmadian et al. 2024 (RLOO)",
        points(rloo=2),
    ),
    Rule(
        ("horizon",), lambda s: s.horizon > LONG_HORIZON,
        "over {s.horizon} actions one return blurs: a critic says which of them mattered",
        "Schulman et al. 2016 (GAE), 2017 (PPO)",
        points(ppo=3, steppo=2),
        note="where each action is one whole step, StepPO (steppo) puts value, advantage and ratio on steps",
    ),
    Rule(
        ("horizon",), lambda s: s.horizon > LONG_HORIZON,
        "without a critic, a step can still be compared where attempts meet in the same state",
        "Feng et al. 2025 (GiGPO)",
        points(gigpo=1),
    ),
    Rule(
        ("steps",), lambda s: s.steps == "explicit" and s.horizon > 1,
        "each action is a step of its own: credit and ratio belong to steps, not to tokens or episodes",
        "StepPO (GAE over steps, ratio of a step)",
        points(steppo=5),
    ),
    Rule(
        ("repeated_states",), lambda s: s.repeated_states and s.horizon > 1,
        "members of a group meet in the same states: what they did there compares directly, without a critic",
        "Feng et al. 2025 (GiGPO)",
        points(gigpo=6),
        note="the environment must give a state_key(), equal for equal states",
    ),
    Rule(
        ("tokens",), lambda s: s.tokens is not None and s.tokens >= LONG_TRAJECTORY,
        "up to {s.tokens} sampled tokens: a mean per trajectory makes each of their tokens count for little, and cuts "
        "at the limit read as failures",
        "Yu et al. 2025 (DAPO), section 3",
        points(dapo=5, cispo=2, gspo=1),
        keys={"algorithm.mask_truncated": True},
        note="dapo's penalty for overlong answers is the reward `overlong`",
    ),
    Rule(
        ("horizon", "reward"), lambda s: s.horizon > SEVERAL and s.reward == "sparse",
        "several turns and one outcome: groups that agree feed the echo trap, so learn from those that differ",
        "Wang et al. 2025 (RAGEN), StarPO-S",
        points(starpo_s=1),
    ),
    # ---- what the reward is
    Rule(
        ("reward",), lambda s: s.reward == "dense",
        "rewards come along the way: returns-to-go and GAE use them where they fall",
        "Schulman et al. 2016 (GAE)",
        points(ppo=2, steppo=2, reinforce_pp=2, gigpo=1),
    ),
    Rule(
        ("reward",), lambda s: s.reward == "process",
        "each step is judged: summed into one return those judgements are lost",
        "Lightman et al. 2023 (step-level judgement)",
        points(ppo=2, steppo=3, gigpo=1),
        note="without a critic: algorithm.advantage: {{type: turn_level}} keeps each judgement on its own step",
    ),
    Rule(
        ("verifiable",), lambda s: s.verifiable and s.reward != "preference",
        "a program can tell right from wrong: score with that verifier (RLVR), not with a reward model",
        "Lambert et al. 2024 (Tülu 3)",
    ),
    Rule(
        ("verifiable", "reward"), lambda s: not s.verifiable and s.reward != "preference",
        "no program can check the outcome: whatever scores it can be gamed, so stay near the starting policy",
        "Gao et al. 2023 (overoptimisation of reward models)",
        keys={"algorithm.kl": 0.01},
        keys_for=CLIPPED | {"reinforce", "rloo", "remax", "decoupled_ppo"},
    ),
    Rule(
        ("reward", "online"), lambda s: s.reward == "preference" and s.online,
        "all that is known is which of two is better: train a reward model on that, then PPO against it",
        "Ouyang et al. 2022 (InstructGPT)",
        points(ppo=5, reinforce_pp=2, rloo=2, dpo=3),
        keys={
            "reward_model.preferences": {"type": "jsonl", "path": "pairs.jsonl"},
            "rewards": [{"type": "reward_model"}],
            "algorithm.kl": 0.01,
        },
        keys_for=frozenset({"ppo", "reinforce_pp", "rloo"}),
    ),
    Rule(
        ("reward", "online", "horizon"), lambda s: s.reward == "preference" and not s.online,
        "recorded pairs and nothing to act in: fit the preference itself, over all actions where there are several",
        "Rafailov et al. 2023 (DPO); Xiong et al. 2024 (multi-turn)",
        points(dpo=6, multi_turn_dpo=5, step_dpo=4),
        keys={
            "algorithm.learns_from": "preferences",
            "preferences": {"type": "jsonl", "path": "pairs.jsonl"},
        },
        keys_for=frozenset({"dpo", "multi_turn_dpo", "step_dpo"}),
    ),
    Rule(
        ("horizon", "reward"), lambda s: s.horizon > 1 and s.reward == "preference" and not s.online,
        "a pair of episodes has many actions: the log-ratio runs over all of them",
        "Xiong et al. 2024 (multi-turn)",
        points(multi_turn_dpo=2),
    ),
    Rule(
        ("steps", "reward"), lambda s: s.steps == "explicit" and s.reward == "preference" and not s.online,
        "the two of a pair share their first steps: what differs begins where they part",
        "Lai et al. 2024 (Step-DPO)",
        points(step_dpo=4),
    ),
    Rule(
        ("online",), lambda s: not s.online,
        "there is nothing to act in: what needs fresh samples cannot run",
        "by definition",
        out(SAMPLING),
    ),
    Rule(
        ("online", "demonstrations"), lambda s: not s.online and s.demonstrations,
        "records of how it is done can be learned as they are",
        "imitation",
        points(sft=4),
        note="sft learns from what cold_start.demonstrator writes",
    ),
    # ---- where the policy stands
    Rule(
        ("success", "demonstrations"), lambda s: _rare(s) and s.demonstrations,
        "almost nothing succeeds, so no group has a member to learn from: begin with demonstrations",
        "DeepSeek-AI 2025 (R1: a cold start before RL)",
        points(sft=7, sft_rl=5),
        note="name the demonstrator in cold_start, then go on with the next candidate on what came of it (one run does "
        "both with cold_start.demonstrations and that preset)",
    ),
    Rule(
        ("success",), lambda s: _rare(s) and not s.demonstrations and s.success != 0,
        "almost nothing succeeds: keep what does and fine-tune on it, until groups have members that differ",
        "Yuan et al. 2023 (RFT)",
        points(rft=7),
        keys={"rollout.group_size": 32},
        note="then go on with the next candidate, on the policy that came of it",
    ),
    Rule(
        ("success", "demonstrations"), lambda s: s.success == 0 and not s.demonstrations,
        "nothing succeeds and nobody shows how: no algorithm can learn from that",
        "by definition",
        note="first take easier tasks, a stronger model, a reward for partial success, or demonstrations",
    ),
    Rule(
        ("success",), lambda s: s.success is not None and (RARE <= s.success < 2 * RARE or s.success > EASY),
        "most groups will agree among themselves: replace those by fresh tasks",
        "Yu et al. 2025 (DAPO), dynamic sampling",
        points(dapo=2, starpo_s=1),
    ),
    Rule(
        ("teacher",), lambda s: s.teacher and s.online,
        "a teacher's log-probabilities judge every token of the policy's own samples: far more signal than a return",
        "Agarwal et al. 2024 (on-policy distillation)",
        points(distillation=6),
        keys={"teacher": {"source": "NAME-OR-FOLDER"}},
    ),
    # ---- how samples and updates meet
    Rule(
        ("staleness",), lambda s: s.staleness > 0,
        "tokens may be {s.staleness} versions old: weigh them by what has changed, apart from the clip of the update",
        "Hilton et al. 2022; Fu et al. 2025 (AReaL)",
        points(decoupled_ppo=6),
        note="learner/… metrics show how far sampler and learner are apart, whichever is chosen",
    ),
    Rule(
        ("staleness",), lambda s: s.staleness > 0,
        "a ratio that is always 1 does not see that the samples are old",
        "by definition",
        out(frozenset({"on_policy"})),
    ),
    Rule(
        ("staleness",), lambda s: s.staleness > 0,
        "how far the sampler may fall behind",
        "Fu et al. 2025 (AReaL)",
        keys={"training.staleness": "{s.staleness}"},
        keys_for=SAMPLING,
    ),
    Rule(
        ("staleness",), lambda s: s.staleness > 0,
        "a plain clip would take the sampler for the policy before the update: recompute that, and correct",
        "Fu et al. 2025 (AReaL); Yao et al. 2025 (truncated importance sampling)",
        keys={"algorithm.old_logprobs": "recompute", "algorithm.correction": {"type": "token_tis"}},
        keys_for=CLIPPED,
    ),
    Rule(
        ("staleness",), lambda s: s.staleness > 0,
        "refilled batches need the batch before them to be over",
        "Renma: batches that do not depend on timing",
        keys={"algorithm.refills": 0},
        keys_for=frozenset({"dapo"}),
    ),
    Rule(
        ("moe", "staleness"), lambda s: s.moe,
        "experts chosen anew in the learner change single tokens' ratios wildly: take the sequence's ratio, or none",
        "Zheng et al. 2025 (GSPO)",
        points(gspo=5, on_policy=4),
        keys={"rollout.record_routing": True},
        keys_for=SAMPLING,
        note="router replay (rollout.record_routing) makes the learner use the experts that sampled",
    ),
    Rule(
        ("group_size",), lambda s: s.group_size == 1,
        "a group of one has nobody to compare with",
        "by definition",
        out(GROUP - RECORDED) | points(reinforce_pp=3, ppo=2, remax=2),
    ),
    Rule(
        ("group_size", "online"), lambda s: s.group_size == 1 and s.online,
        "a pair needs two attempts",
        "by definition",
        out(GROUP & RECORDED),
    ),
    Rule(
        ("group_size", "online"), lambda s: s.group_size == 1 and not s.online,
        "a recorded pair is a group of two",
        "by definition",
        keys={"rollout.group_size": 2},
        keys_for=GROUP & RECORDED,
    ),
    Rule(
        ("group_size",), lambda s: 2 <= s.group_size <= 3,
        "the mean and std of {s.group_size} returns are mostly noise: leaving one out is unbiased",
        "Ahmadian et al. 2024 (RLOO)",
        points(rloo=2, dr_grpo=1),
    ),
    Rule(
        ("memory", "model_size"), lambda s: s.tight,
        "policy and critic take {s.critic_gb:.0f} GB before activations, of {s.memory:g} GB: do without a critic",
        "weights, gradients and two Adam moments in float32, twice",
        points(ppo=-6, steppo=-6, grpo=2, reinforce_pp_baseline=2, dr_grpo=1, rloo=1, gigpo=1),
        keys={"critic.trunk": "shared"},
        keys_for=CRITIC,
    ),
    Rule(
        ("horizon",), lambda s: s.horizon == 1,
        "one action an episode: credit for steps is credit for episodes",
        "by definition",
        points(gigpo=-5, steppo=-5, starpo_s=-1),
    ),
    Rule(
        ("families",), lambda s: s.families > 1,
        "{s.families} kinds of task share a batch: standardise advantages within each, or the loudest wins",
        "AgentRL (arXiv 2510.04206)",
        keys={"algorithm.task_normalisation": True},
        keys_for=SAMPLING - {"rft", "distillation"},
    ),
)  # fmt: skip


def _rare(s: Situation) -> bool:
    return s.success is not None and s.success < RARE
