"""TRL's GRPOTrainer on the same work as one of Renma's recipes; runs in TRL's own environment.

    .venvs/trl/bin/python -m benchmarks.peers.trl_grpo WORK.json RESULT.json

`benchmarks/end_to_end.py` writes WORK.json (see `Work`) and reads RESULT.json. The trainer is set up as fast as TRL's
own options allow on a CPU: one generation of the whole batch a step, no gradient checkpointing, no reference model, no
old log-probabilities (aligned steps need none), the fused AdamW, no workers, logging, evaluation or checkpoints.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental: known

import torch
import trl.trainer.utils
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.trl_rollout import Episode, Format, Rollout, given_to_trl
from renma.types import Task


@dataclass(frozen=True, slots=True)
class Work:
    """policy: a Hugging Face folder. tasks: a list of tasks for each step. rates: the learning rate of each step.

    micro_batch: trajectories whose gradient is computed at once. head: `stock` is TRL as it is, whose output layer on a
    CPU scores prompt positions too; `completions` lets it score the completions alone, as it does on a GPU.
    saves: after which steps the policy is saved, and where; the clock stands still meanwhile.
    """

    policy: str
    form: dict[str, Any]
    tasks: list[list[dict[str, Any]]]
    rates: list[float]
    loss: str
    scale_rewards: str
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float | None
    clip: tuple[float, float]
    micro_batch: int
    seed: int
    dtype: str = "float32"
    head: str = "stock"
    threads: int = 2
    saves: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class StepRecord:
    """One step: seconds in all, of them in `rollout_func`; what was sampled. mixed: the share of groups whose members
    differ in success, which are those with a gradient."""

    seconds: float
    generation: float
    trajectories: int
    sampled_tokens: int
    turns: float
    success: float
    mixed: float


class Clock(TrainerCallback):
    """Measures from one optimiser step's end to the next one's; saves what is asked for outside of that."""

    def __init__(self, work: Work, tokenizer: Any) -> None:
        self.work, self.tokenizer = work, tokenizer
        self.steps: list[StepRecord] = []
        self.generation = 0.0
        self.episodes: list[Episode] = []
        self._mark = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._mark = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        seconds = time.perf_counter() - self._mark
        count, size = len(self.episodes), self.work.form["group_size"]
        groups = [{e.success for e in self.episodes[i : i + size]} for i in range(0, count, size)]
        self.steps.append(
            StepRecord(
                seconds,
                self.generation,
                count,
                sum(sum(episode.sampled) for episode in self.episodes),
                sum(episode.turns for episode in self.episodes) / count,
                sum(episode.success for episode in self.episodes) / count,
                sum(len(group) > 1 for group in groups) / len(groups),
            )
        )
        last = self.steps[-1]
        print(
            f"trl step {state.global_step}/{state.max_steps}: {last.seconds:.1f} s, {last.generation:.1f} of them "
            f"sampling {last.sampled_tokens} tokens; success {last.success:.2f}",
            file=sys.stderr,
            flush=True,
        )
        folder = self.work.saves.get(str(state.global_step))
        if folder is not None:
            parts["model"].save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        self._mark = time.perf_counter()


def train(work: Work, scratch: Path) -> list[StepRecord]:
    """Every step's record."""
    dtype = getattr(torch, work.dtype)
    tokenizer = AutoTokenizer.from_pretrained(work.policy, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(work.policy, dtype=torch.float32, attn_implementation="sdpa")
    form = Format(**work.form)
    rollout = Rollout(model, tokenizer, form, None if dtype == torch.float32 else dtype)
    clock = Clock(work, tokenizer)
    steps = [[Task(**task) for task in tasks] for tasks in work.tasks]
    prompts = [task.prompt for tasks in steps for task in tasks]

    def rollout_func(given: Sequence[str], trainer: GRPOTrainer) -> dict[str, Any]:
        started = time.perf_counter()
        tasks = steps[len(clock.steps)]
        if list(given) != [task.prompt for task in tasks for _ in range(form.group_size)]:
            raise ValueError("TRL gives prompts in another order than the tasks'")
        clock.episodes = rollout.run(tasks)
        clock.generation = time.perf_counter() - started
        return dict(given_to_trl(clock.episodes))

    def success(completions: Sequence[str], success: list[float], **rest: Any) -> list[float]:
        return success

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=success,
        args=settings(work, form, len(steps[0]), scratch),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        rollout_func=rollout_func,
        callbacks=[clock],
        optimizers=optimizer(work, model),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return clock.steps


def settings(work: Work, form: Format, tasks: int, scratch: Path) -> GRPOConfig:
    """The options of one training, for `tasks` tasks a step."""
    trajectories = tasks * form.group_size
    micro_batch = min(work.micro_batch, trajectories)
    if trajectories % micro_batch:
        raise ValueError(f"{trajectories} trajectories a step cannot be divided into parts of {micro_batch}")
    return GRPOConfig(
        output_dir=str(scratch),
        max_steps=len(work.tasks),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=trajectories // micro_batch,
        steps_per_generation=trajectories // micro_batch,
        num_generations=form.group_size,
        num_iterations=1,
        max_completion_length=form.max_tokens * form.max_turns,  # the divisor of dr_grpo; nothing is cut by it
        temperature=form.temperature,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type=work.loss,
        scale_rewards=work.scale_rewards,
        epsilon=1 - work.clip[0],
        epsilon_high=work.clip[1] - 1,
        max_grad_norm=work.clip_norm or 0.0,
        gradient_checkpointing=False,
        bf16=work.dtype == "bfloat16",
        fp16=False,
        use_cpu=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        report_to=[],
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        seed=work.seed % 2**32,
    )


def optimizer(work: Work, model: Any) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """The fused AdamW with the recipe's rate at every step; weight decay for matrices alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": work.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1.0, betas=tuple(work.betas), eps=work.eps, fused=True)
    rates = [*work.rates, 0.0]  # the schedule is asked once more after the last step
    return adamw, torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: rates[step])


def main(work_file: str, result_file: str) -> None:
    work = Work(**json.loads(Path(work_file).read_text(encoding="utf-8")))
    torch.set_num_threads(work.threads)
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)  # TRL's own defaults, by old names
    if work.head == "completions":
        trl.trainer.utils._use_triton = lambda device: True  # which positions are scored; the tiles stay torch's
    steps = train(work, Path(result_file).with_suffix(".trl"))
    result = {
        "steps": [asdict(step) for step in steps],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
    }
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
