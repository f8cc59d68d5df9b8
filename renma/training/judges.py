"""Models that are asked about a batch beside the policy: the reference, the teacher, the critic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from renma.errors import RecipeError
from renma.learning.critic import Critic
from renma.learning.learner import Learner
from renma.learning.scorer import Scorer
from renma.models.policy import Policy, load_policy, save_policy
from renma.recipe import PretrainedModel, Recipe
from renma.training.algorithms import Algorithm

REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Judges:
    """reference: the starting policy. teacher: the policy to be distilled. critic: gives the values of states."""

    reference: Scorer | None = None
    teacher: Scorer | None = None
    critic: Critic | None = None


def make_judges(recipe: Recipe, algorithm: Algorithm, policy: Policy, learner: Learner, folder: Path) -> Judges:
    """Those that the algorithm needs, made from the policy as training begins.

    The reference is kept in the run's folder, so that a resumed run has the same one. Raises RecipeError when the
    teacher reads other token ids than the policy.
    """
    reference = teacher = critic = None
    if algorithm.needs_reference:
        kept = folder / REFERENCE
        if not kept.exists():
            save_policy(policy, kept)
        reference = _scorer(recipe, policy, PretrainedModel(source=str(kept)))
    if "teacher" in algorithm.needs:
        assert recipe.teacher is not None  # the recipe's check saw to it
        teacher = _scorer(recipe, policy, recipe.teacher)
    if "values" in algorithm.needs:
        critic = Critic.of(policy, recipe.critic, recipe.learner, learner)
    return Judges(reference, teacher, critic)


def _scorer(recipe: Recipe, policy: Policy, section: PretrainedModel) -> Scorer:
    """A frozen policy, read over the trained one's output tokens."""
    same = {"dtype": recipe.model.dtype, "device": recipe.model.device}
    other = load_policy(section.model_copy(update=same))
    if other.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise RecipeError(
            f"teacher.source {section.source!r} has another vocabulary than the policy: its log-probabilities are of "
            "other tokens; take a teacher of the same family"
        )
    scorer = Scorer(
        other.model.requires_grad_(False),
        output_ids=policy.output_ids,
        temperature=recipe.sampling.temperature,
        max_positions=recipe.learner.max_positions,
        logit_chunk=recipe.learner.logit_chunk,
    )
    scorer.tree.replays_routing = False  # another policy chooses its own experts
    return scorer
