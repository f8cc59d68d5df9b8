"""The recipe: one typed tree that says what to train, on what, and how. A class's defaults are the vetted values.

Loading, overriding and the messages for mistakes are in recipe_load.py; checks that need the parts named (does this
estimator take a group of one?) are in recipe_checks.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Unknown keys are errors; values are frozen once loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Component(BaseModel):
    """A part named by `type` (a registered name or `module.path:Name`), its options beside it.

    The options are the keyword arguments of the part's constructor; recipe_checks.py checks names and types at load.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    type: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class LoraSettings(Section):
    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: str | list[str] = "all-linear"


class ModelSection(Section):
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="compute type; auto: bfloat16 where the device multiplies it natively, else float32"
    )
    device: str = Field("auto", description="auto picks cuda, then mps, then cpu")
    lora: LoraSettings | None = None
    output_tokens: Literal["all", "tasks"] = Field(
        "all",
        description="the tokens the policy can emit; 'tasks': those in the text of tasks, header and demonstrations. "
        "Sampler and learner both normalise over this set, so the policy stays exact and a large vocabulary cheap",
    )


class PretrainedModel(ModelSection):
    """A causal LM from a local folder, the Hugging Face hub, or a name that `renma list models` shows."""

    type: Literal["pretrained"] = "pretrained"
    source: str
    revision: str | None = None


class ScratchModel(ModelSection):
    """A small Llama made from scratch, with a BPE tokenizer trained on the environment's own transcripts."""

    type: Literal["scratch"] = "scratch"
    layers: int = Field(4, ge=1)
    hidden: int = Field(192, ge=8)
    heads: int = Field(6, ge=1)
    feed_forward: int = Field(512, ge=8)
    vocabulary: int = Field(320, ge=257)
    context: int = Field(256, ge=16)


class AgentSection(Section):
    """How observations become prompts and samples become actions."""

    renderer: Component = Component(type="plain")
    parser: Component = Component(type="plain")
    context: Literal["append"] = "append"


class SamplingSection(Section):
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, lt=1)
    max_tokens: int = Field(64, ge=1, description="the most tokens of one action")


class CrossPolicySection(Section):
    """Some samples come from an older snapshot of the policy: exploration stays wide (AgentRL, arXiv 2510.04206)."""

    mode: Literal["step", "mixed"] = Field("step", description="a policy for every action, or for a whole trajectory")
    stale_share: float = Field(0.25, gt=0, lt=1, description="share of draws that go to the snapshot")
    refresh_every: int = Field(25, ge=1, description="updates between snapshots")


class RolloutSection(Section):
    tasks_per_step: int = Field(16, ge=1, description="groups in a training step")
    group_size: int = Field(8, ge=1, description="trajectories of one task")
    max_turns: int | None = Field(None, ge=1, description="actions per episode; None: the environment's own limit")
    engine: Component = Field(Component(type="local"), description="what samples: local, or vllm (docs/engines.md)")
    slots: int = Field(128, ge=1, description="requests decoded at once; the local engine computes equal ones once")
    retries: int = Field(2, ge=0, description="fresh environments tried after an environment error")
    episode_seconds: float | None = Field(None, gt=0)
    reward_workers: int = Field(
        8, ge=1, description="trajectories whose plain (blocking) rewards run at once, in threads"
    )
    drop_groups_with: list[str] = Field(
        default_factory=lambda: ["environment_error"],
        description="stop reasons of a failed member that drop its whole group; for others (a time-out, say) "
        "only the member is left out",
    )
    deterministic: bool = Field(
        True,
        description="decode only when no episode is busy in its environment, so that batches, and with them the last "
        "bits of a log-probability, do not depend on timing. Turn off for slow environments",
    )
    cross_policy: CrossPolicySection | None = None
    record_routing: bool = Field(
        True, description="a mixture of experts: keep the experts chosen when sampling, and learn with the same"
    )


class AlgorithmSection(Section):
    """A preset of training/algorithms.py; every other key, where given, replaces that part of it."""

    preset: str = "grpo"
    advantage: Component | None = None
    loss: Component | None = None
    aggregate: Literal["token_mean", "sequence_mean", "step_mean", "constant"] | None = None
    learns_from: Literal["samples", "demonstrations", "samples_and_demonstrations", "preferences"] | None = None
    old_logprobs: Literal["behaviour", "recompute", "on_policy"] | None = None
    correction: Component | None = Field(None, description="rollout correction; {type: none} takes the preset's away")
    kl: float | None = Field(None, ge=0, description="coefficient of the pull to the starting policy")
    kl_form: Literal["k2", "k3_ratio", "k1_reward"] | None = Field(None, description="in the loss, or in the reward")
    entropy: float | None = None
    select: Component | None = Field(None, description="groups to learn from; {type: none} takes the preset's away")
    refills: int | None = Field(None, ge=0, description="rounds of fresh tasks in place of groups left out by select")
    task_normalisation: bool | None = Field(None, description="advantages standardised within each task family")
    mask_truncated: bool | None = None
    skip_zero: bool | None = Field(None, description="trajectories with advantage 0 get no loss and no normaliser")


class LearnerSection(Section):
    learning_rate: float = Field(1e-5, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float | None = Field(1.0, gt=0)
    mini_batch: int | None = Field(
        None, ge=1, description="trajectories per optimiser step; None: the whole batch in one step"
    )
    epochs: int = Field(1, ge=1)
    max_positions: int = Field(4096, ge=16, description="distinct token positions computed at once (memory)")
    logit_chunk: int = Field(256, ge=1, description="positions whose logits exist at once")
    measured_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="share of the trajectories without a signal (advantage 0) that are run all the same, for the "
        "statistics: entropy, mismatch",
    )


class CriticSection(Section):
    """The value of states, for algorithms whose advantage needs one (ppo, steppo). Others ignore it."""

    trunk: Literal["separate", "shared"] = Field(
        "separate", description="its own copy of the policy's body, or the same"
    )
    learning_rate: float | None = Field(None, gt=0, description="None: 10 times the policy's")
    clip: float | None = Field(0.2, gt=0, description="how far a value may move from the one credit was given with")
    warmup_steps: int = Field(0, ge=0, description="training steps in which only the critic learns")
    coefficient: float = Field(0.5, gt=0, description="weight of its loss in the policy's objective (shared trunk)")
    detach: bool = Field(False, description="shared trunk: train the head alone")


class ColdStartSection(Section):
    """Supervised learning on demonstrations, before the reinforcement learning."""

    demonstrator: Component
    demonstrations: int = Field(512, ge=0, description="0: no cold start; the demonstrator serves sft and sft_rl")
    epochs: int = Field(1, ge=1)
    batch: int = Field(32, ge=1)
    learner: LearnerSection = LearnerSection()


class RewardModelSection(Section):
    """A reward model trained before the reinforcement learning, for rewards with source: stage."""

    form: Literal["outcome", "process"] = Field(
        "outcome", description="one score a trajectory from pairs, or one a step from labels"
    )
    preferences: Component = Component(type="sampled")
    model: str | None = Field(None, description="the model it starts from; None: a copy of the policy")
    held_out: float = Field(0.1, ge=0, lt=1, description="share of the tasks that it is measured on")
    epochs: int = Field(1, ge=1)
    batch: int = Field(32, ge=1, description="pairs (process: groups) an optimiser step")
    centre: bool = Field(True, description="shift outcome scores to a mean of 0 over the training pairs")
    learner: LearnerSection = LearnerSection()


class EvaluationSet(Section):
    name: str
    source: Component
    limit: int | None = Field(None, ge=1)


class EvaluationSection(Section):
    sets: list[EvaluationSet] = Field(default_factory=list)
    every: int = Field(0, ge=0, description="training steps between evaluations; 0: only before and after")
    limit: int | None = Field(None, ge=1, description="tasks per set in the evaluations between")
    k: int = Field(1, ge=1, description="attempts per task")
    temperature: float = Field(0.0, ge=0)


class TrainingSection(Section):
    steps: int = Field(50, ge=0)
    staleness: int = Field(0, ge=0, description="the most versions a sampled token may be behind the learner")
    checkpoint_every: int = Field(10, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = Field(2, ge=1)
    mismatch_tolerance: float | None = Field(
        None,
        gt=0,
        description="mean |log-probability of engine - of learner| over which the first batch stops the run; None: "
        "0.05, or 0.3 where the engine samples with int8 weights",
    )


class Recipe(Section):
    """The whole tree."""

    name: str = "run"
    seed: int = Field(0, ge=0)
    model: Annotated[PretrainedModel | ScratchModel, Field(discriminator="type")]
    tasks: Component
    environment: Component
    agent: AgentSection = AgentSection()
    sampling: SamplingSection = SamplingSection()
    rollout: RolloutSection = RolloutSection()
    rewards: list[Component] = Field(default_factory=list, description="empty: the environment's own rewards")
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    critic: CriticSection = CriticSection()
    teacher: PretrainedModel | None = Field(None, description="the policy that `distillation` learns from")
    preferences: Component | None = Field(None, description="recorded pairs, for learns_from: preferences")
    cold_start: ColdStartSection | None = None
    reward_model: RewardModelSection | None = None
    evaluation: EvaluationSection = EvaluationSection()
    training: TrainingSection = TrainingSection()
    trackers: list[Literal["tensorboard"]] = ["tensorboard"]
