"""What a sampler that disagrees with the learner does to training, and what each rollout correction does about it.

    python benchmarks/correction.py --out correction.json              # goes on where it stopped
    python benchmarks/correction.py --out correction.json --table

Runs of the corridor (corridor.py), whose sampler is the local engine over a changed copy of the learner's weights,
renewed with every update. It records its own log-probabilities, as a real one would:

    noise    a number for each token is added to its logit, drawn anew for every version of the weights
    int8     every matrix is rounded to 8 bits a row, as a quantised engine's would be (4 bits: `int4`)
    exact    nothing is changed

The loss is grpo's, with the ratio against the learner's own log-probabilities (old_logprobs: recompute): by itself it
cannot see the mismatch. `none` leaves it so; `against-mu` takes the ratio against what the sampler recorded. What is
measured is the learner's policy, sampled exactly.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from benchmarks.credit import HORIZONS
from benchmarks.tiny_runs import Results, parsed, run, starting_policy
from renma.evaluation.statistics import estimate_mean
from renma.inference.local import LocalEngine
from renma.models.policy import Policy
from renma.seeding import seed_for
from renma.training.setup import Parts

Disturb = Callable[[Any, int], None]  # a causal model that may be changed in place, the weights' version


def rounded(weight: Tensor, bits: int) -> Tensor:
    """The matrix with each row rounded to 2**bits - 1 levels, symmetric about 0 (absmax scaling)."""
    levels = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / levels
    return (weight / scale).round() * scale


def quantise(bits: int) -> Disturb:
    def disturb(model: Any, version: int) -> None:
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(rounded(parameter, bits))

    return disturb


def noise(scale: float, seed: int = 0) -> Disturb:
    """A normal number of this scale for each token of the vocabulary, the same at every position of a version."""

    def disturb(model: Any, version: int) -> None:
        generator = torch.Generator().manual_seed(seed_for("logit noise", seed, version) % 2**63)
        head = model.get_output_embeddings()
        head.bias = nn.Parameter(scale * torch.randn(len(head.weight), generator=generator), requires_grad=False)

    return disturb


class DisturbedEngine(LocalEngine):
    """Samples from a changed copy of the policy. With every version the copy takes the policy's weights anew."""

    def __init__(self, policy: Policy, disturb: Disturb, slots: int) -> None:
        self._origin, self._disturb = policy.model, disturb
        self._copy = copy.deepcopy(policy.model)
        super().__init__(self._copy, policy.tokenizer, output_ids=policy.output_ids, slots=slots)

    async def load_weights(self, version: int) -> None:
        with torch.no_grad():
            ours = dict(self._copy.named_parameters())
            for name, theirs in self._origin.named_parameters():
                ours[name].copy_(theirs)
            self._disturb(self._copy, version)
        await super().load_weights(version)


def sampling_from(disturb: Disturb) -> Callable[[Parts], None]:
    """Training samples come from a disturbed engine; evaluation stays with the exact one."""

    def change(parts: Parts) -> None:
        engine = DisturbedEngine(parts.policy, disturb, parts.recipe.rollout.slots)
        parts.engine = engine
        parts.runner = replace(parts.runner, engine=engine)

    return change


SAMPLERS: dict[str, Callable[[], Disturb]] = {
    "exact": lambda: lambda model, version: None,
    "int8": lambda: quantise(8),
    "int4": lambda: quantise(4),
    "noise-0.3": lambda: noise(0.3),
    "noise-1": lambda: noise(1.0),
}
BASE: dict[str, Any] = {"preset": "grpo", "old_logprobs": "recompute"}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": BASE,
    "against-mu": {"preset": "grpo"},
    "token-tis": {**BASE, "correction": {"type": "token_tis"}},
    "sequence-tis": {**BASE, "correction": {"type": "sequence_tis"}},
    "mis": {**BASE, "correction": {"type": "sequence_mis"}},
    "geometric": {**BASE, "correction": {"type": "geometric_rejection"}},
    # the default bounds are for mismatches of 0.001 a token; these let more of a coarse sampler's episodes pass
    "geometric-wide": {**BASE, "correction": {"type": "geometric_rejection", "low": 0.95, "high": 1.05}},
}
KEPT = (
    "grad_norm",
    "kl_behaviour",
    "mismatch_mean",
    "mismatch_max",
    "effective_sample_size",
    "correction_clip_share",
    "correction_reject_share",
)


COLUMNS = ("success [95 %]", "area", "gradient norm", "largest", "mean |Δ|", "max |Δ|", "ESS", "clipped", "rejected")


def one_run(sampler: str, correction: str, seed: int, arguments: argparse.Namespace, **more: Any) -> dict[str, Any]:
    policy = starting_policy(HORIZONS, seed, arguments.policies)
    result = run(
        arguments.doors,
        seed,
        CORRECTIONS[correction],
        policy,
        arguments.rate,
        budget=arguments.budget,
        keep=[f"learner/{name}" for name in KEPT],
        change=sampling_from(SAMPLERS[sampler]()),
        training={"steps": 100_000, "checkpoint_every": 0, "mismatch_tolerance": 100.0},
        **more,
    )
    return {"sampler": sampler, "correction": correction, **result}


def measure(arguments: argparse.Namespace, results: Results, console: Console) -> None:
    plan = [
        (sampler, correction, seed)
        for seed in range(arguments.seeds)
        for sampler in arguments.samplers
        for correction in arguments.corrections
        if sampler != "exact" or correction == "none"  # with nothing to correct they are all the same
    ]
    left = [entry for entry in plan if "/".join(map(str, entry)) not in results.runs]
    with Progress(console=console) as progress:
        whole = progress.add_task("runs", total=len(left))
        one = progress.add_task("", total=1.0)
        for sampler, correction, seed in left:
            name = f"{sampler}, {correction}, seed {seed}"

            def report(text: str, share: float, name: str = name) -> None:
                progress.update(one, description=f"{name}: {text}", completed=share)

            result = one_run(sampler, correction, seed, arguments, progress=report)
            results.add(f"{sampler}/{correction}/{seed}", result)
            console.print(f"{name}: {result['start']:.2f} -> {result['success']:.2f}, {result['seconds']:.0f} s")
            progress.advance(whole)


def show(results: Results, console: Console) -> None:
    table = Table(title="the learner's success after training, and means over all updates and seeds")
    table.add_column("sampler")
    table.add_column("correction")
    for title in COLUMNS:
        table.add_column(title, justify="right")
    for sampler in SAMPLERS:
        for correction in CORRECTIONS:
            runs = [r for r in results.runs.values() if (r["sampler"], r["correction"]) == (sampler, correction)]
            if runs:
                table.add_row(sampler, correction, *_cells(runs))
    console.print(table)


def _cells(runs: Sequence[dict[str, Any]]) -> list[str]:
    points = [point for r in runs for point in r["curve"]]

    def values(name: str) -> list[float]:
        return [point[f"learner/{name}"] for point in points if f"learner/{name}" in point]

    def mean(name: str, form: str = ".3f") -> str:
        return format(float(np.mean(values(name))), form) if values(name) else "-"

    success = [r["success"] for r in runs]
    found = estimate_mean(success)
    return [
        f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]" if len(success) > 1 else f"{success[0]:.2f}",
        f"{np.mean([r['area'] for r in runs]):.2f}",
        mean("grad_norm"),
        f"{max(values('grad_norm'), default=float('nan')):.2f}",
        mean("mismatch_mean", ".4f"),
        f"{max(values('mismatch_max'), default=float('nan')):.2f}",
        mean("effective_sample_size", ".2f"),
        mean("correction_clip_share", ".1%"),
        mean("correction_reject_share", ".1%"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS), choices=list(SAMPLERS), metavar="NAME")
    parser.add_argument("--corrections", nargs="+", default=list(CORRECTIONS), choices=list(CORRECTIONS), metavar="C")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--doors", type=int, default=4, choices=HORIZONS)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate, the same for all")
    arguments = parsed(parser, "correction.json")
    console, results = Console(), Results(arguments.out)
    if not arguments.table:
        measure(arguments, results, console)
    show(results, console)


if __name__ == "__main__":
    main()
