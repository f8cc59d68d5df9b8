"""What the optimiser steps of a batch minimise, and which combinations of its parts make no sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from torch import Tensor

from renma.errors import RecipeError
from renma.learning.correction import Correction
from renma.learning.losses.base import LossInput, PolicyLoss, Traits, traits, weighed
from renma.learning.losses.kl import KlForm, k2, k3, k3_ratio
from renma.learning.rows import MissingLogprobs, Row
from renma.registry import nearest

OldLogprobs = Literal["behaviour", "recompute", "on_policy"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The aggregate of factor * loss + kl * KL(pi, reference) - entropy * H over the tokens that are kept.

    factor and which tokens are kept: the correction's. old_logprobs: what pi_old is: "behaviour" the recorded
    log-probabilities, "recompute" the policy as the batch begins, "on_policy" pi itself.

    A correction is made from the policy as the batch begins, whatever `old_logprobs` is, so it costs one pass without
    gradient. Refused are: a correction that weighs by pi_old/mu beside a loss whose own ratio is already against mu
    (the mismatch would count twice; one that only rejects goes with it), and any for a supervised loss.
    """

    loss: PolicyLoss
    aggregate: str = "token_mean"
    constant_length: float = 1.0
    kl: float = 0.0
    kl_form: KlForm = "k2"
    entropy: float = 0.0
    old_logprobs: OldLogprobs = "behaviour"
    correction: Correction | None = None

    @property
    def traits(self) -> Traits:
        return traits(self.loss)

    @property
    def silent_at_zero_advantage(self) -> bool:
        """Whether a token without advantage has a gradient of exactly 0."""
        return self.kl == 0 and self.entropy == 0 and self.traits.scales_with_advantage

    @property
    def needs_behaviour(self) -> str | None:
        """The part that needs recorded log-probabilities; None: nothing does."""
        loss = self.traits
        if self.correction is not None:
            return f"correction {self.correction.kind!r}"
        if loss.against == "behaviour" or (hasattr(self.loss, "against") and self._ratio_to_behaviour):
            return "the loss's importance ratio"
        if self.kl and self.kl_form == "k3_ratio" and self.old_logprobs == "behaviour":
            return "kl_form 'k3_ratio'"
        return None

    @property
    def _ratio_to_behaviour(self) -> bool:
        return self.traits.against == "old" and self.old_logprobs == "behaviour"

    def check(self, *, staleness: int = 0) -> None:
        """Raise RecipeError for parts that contradict each other. staleness: how many versions samples may be behind.

        With stale samples a ratio against the policy as the batch begins does not see how old they are: its clip never
        acts on that (case 6.7). Without a correction that is refused.
        """
        loss, correction = self.traits, self.correction
        for name, value, known in (
            ("old_logprobs", self.old_logprobs, get_args(OldLogprobs)),
            ("kl_form", self.kl_form, get_args(KlForm)),
        ):
            if value not in known:
                raise RecipeError(f"unknown {name} {value!r}: {nearest(value, list(known))}")
        if loss.needs_recompute and self.old_logprobs == "behaviour":
            raise RecipeError(
                "old_logprobs 'behaviour' makes pi_old/mu 1 and leaves nothing of this loss's weight; use "
                "old_logprobs: recompute"
            )
        if correction is not None and loss.supervised:
            raise RecipeError(
                f"correction {correction.kind!r}: this loss learns what it is given, whoever wrote it, and there is "
                "nothing to correct; leave correction out"
            )
        if correction is not None and correction.weighs and loss.against == "behaviour":
            raise RecipeError(
                f"correction {correction.kind!r} weighs by pi_old/mu, and this loss has such a weight of its own: "
                "leave one of them out, or use a correction that only rejects"
            )
        if correction is not None and correction.weighs and self._ratio_to_behaviour:
            raise RecipeError(
                f"correction {correction.kind!r} weighs by pi_old/mu, and with old_logprobs 'behaviour' the loss's "
                "ratio is already taken against mu: use old_logprobs: recompute, or a correction that only rejects"
            )
        if staleness and correction is None and loss.against == "old" and self.old_logprobs != "behaviour":
            raise RecipeError(
                f"samples up to {staleness} versions old with old_logprobs {self.old_logprobs!r}: the ratio would not "
                "see that the sampler was older; use old_logprobs: behaviour, the loss 'decoupled', or a correction"
            )

    def check_rows(self, rows: Sequence[Row], version: int | None = None) -> None:
        """Raise MissingLogprobs where recorded log-probabilities are needed and a row has none; RecipeError for tokens
        sampled by versions before `version` (the learner's own; None: not known) that `check` refuses."""
        what = self.needs_behaviour
        if what is not None and not self.traits.takes_demonstrations:
            for row in rows:
                missing = int(np.count_nonzero(np.isnan(row.logprobs[row.trained])))
                if missing:
                    raise MissingLogprobs(
                        f"{what} needs the log-probabilities recorded when sampling, and {missing} tokens of "
                        f"trajectory {row.trajectory} have none: train demonstrations with the sft loss, or ask the "
                        "engine for log-probabilities"
                    )
        if version is not None:
            oldest = min(int(row.versions[row.trained].min()) for row in rows)
            self.check(staleness=max(0, version - oldest))

    def charge(self, given: LossInput, factor: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """What each token of a pack costs [n], before the aggregate's weights, and statistics of each token.

        factor [n]: the correction's. kl_reference is k3 of KL(pi||ref), kl_penalty the form that is charged.
        Raises ValueError when the loss does not give one value a token; MissingLogprobs where it gives NaN for want of
        a recorded log-probability.
        """
        charge, statistics = self.loss(given)
        if charge.shape != given.logp.shape:
            raise ValueError(
                f"a policy loss gives one value a token, {tuple(given.logp.shape)}; got {tuple(charge.shape)}"
            )
        if bool(charge.isnan().any()) and bool(given.behaviour.isnan().any()):
            raise MissingLogprobs(
                "the loss needs the log-probabilities recorded when sampling, and these rows have none: train "
                "demonstrations with the sft loss, or ask the engine for log-probabilities"
            )
        if factor is not None:
            charge = weighed(charge, factor)
        if given.reference is not None:
            statistics = statistics | {"kl_reference": k3(given.logp.detach(), given.reference)}
            if self.kl:
                if self.kl_form == "k2":
                    penalty = k2(given.logp, given.reference)
                else:
                    penalty = k3_ratio(given.logp, given.reference, given.old)
                statistics["kl_penalty"] = penalty.detach()
                charge = charge + self.kl * penalty
        if self.entropy:
            assert given.entropy is not None
            charge = charge - self.entropy * given.entropy
        return charge, statistics
