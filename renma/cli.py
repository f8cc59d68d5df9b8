"""The command line. Each command checks its input, then hands over; a RenmaError is one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from renma.errors import RenmaError


class Shown(StrEnum):
    """auto: a live view in a terminal, plain elsewhere. plain: a line a step. json: an object an event."""

    auto = "auto"
    plain = "plain"
    quiet = "quiet"
    json = "json"


app = typer.Typer(
    name="renma", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
plan = typer.Typer(no_args_is_help=True, help="Decide something before a run.")
app.add_typer(plan, name="plan")
Overrides = Annotated[list[str] | None, typer.Argument(help="overrides: section.key=value", show_default=False)]
Output = Annotated[Path, typer.Option(help="where run folders are made")]
View = Annotated[Shown, typer.Option("--progress", help="how the run is shown")]
Profile = Annotated[
    bool, typer.Option("--profile", help="write traces of a few steps, and where their time goes, to RUN/profile")
]
ProfileSteps = Annotated[int, typer.Option("--profile-steps", help="how many, after the first", min=1)]
errors = Console(stderr=True)


def one_line_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """A user's mistake ends the command with one line; an interrupt says how to go on."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except RenmaError as error:
            errors.print(f"renma: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(error.exit_code) from None
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            errors.print(f"renma: {error}: {DISK_ERRORS[error.errno]}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(RunFault) from None
        except KeyboardInterrupt:
            errors.print("renma: interrupted; what was finished is saved", style="yellow")
            raise typer.Exit(130) from None

    return run


RunFault = 5
DISK_ERRORS = {
    28: "the disk is full; free some space and `renma resume` the run",
    30: "the file system is read-only; choose another --output",
    13: "permission denied; choose another --output",
    122: "the disk quota is used up; free some space and `renma resume` the run",
}


@app.command()
@one_line_errors
def train(
    recipe: Annotated[str, typer.Argument(help="a YAML file, or the name of a recipe that comes with Renma")],
    overrides: Overrides = None,
    output: Output = Path("runs"),
    progress: View = Shown.auto,
    profile: Profile = False,
    profile_steps: ProfileSteps = 2,
) -> None:
    """Train a recipe; any leaf can be overridden: renma train quickstart training.steps=50."""
    from renma.recipes import find_recipe
    from renma.training.trainer import Trainer

    steps = profile_steps if profile else 0
    trainer = Trainer(
        find_recipe(recipe), overrides=overrides or (), output=output, progress=progress.value, profile=steps
    )
    try:
        trainer.fit()
    except KeyboardInterrupt:
        if trainer.folder is not None:
            errors.print(
                f"renma: interrupted; go on with: renma resume {trainer.folder.path}", style="yellow", soft_wrap=True
            )
        raise typer.Exit(130) from None


@app.command()
@one_line_errors
def resume(
    run: Annotated[Path, typer.Argument(help="the folder of a run")],
    overrides: Overrides = None,
    progress: View = Shown.auto,
    profile: Profile = False,
    profile_steps: ProfileSteps = 2,
) -> None:
    """Go on with a run from its last checkpoint."""
    from renma.training.trainer import Trainer

    steps = profile_steps if profile else 0
    Trainer(resume=run, overrides=overrides or (), progress=progress.value, profile=steps).fit()


@app.command(name="eval")
@one_line_errors
def evaluate_command(
    source: Annotated[str, typer.Argument(help="a run folder, a model folder, a Hugging Face id or a model's name")],
    overrides: Overrides = None,
    recipe: Annotated[str | None, typer.Option(help="the recipe; a run has its own")] = None,
    k: Annotated[int, typer.Option(help="attempts at each task", min=1)] = 1,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: 1 when k > 1", min=0)] = None,
    limit: Annotated[int | None, typer.Option(help="tasks of each set", min=1)] = None,
    save: Annotated[Path | None, typer.Option(help="write the results to this JSON file")] = None,
) -> None:
    """Measure a run or a model: success with its interval, pass@k over k attempts."""
    from renma.evaluation.command import evaluate_source

    evaluate_source(source, recipe, overrides or [], k=k, temperature=temperature, limit=limit, save=save)


@app.command()
@one_line_errors
def rollout(
    source: Annotated[str, typer.Argument(help="a run folder, a recipe, a model folder or id")],
    overrides: Overrides = None,
    recipe: Annotated[str | None, typer.Option(help="the recipe; a run has its own")] = None,
    n: Annotated[int, typer.Option("-n", help="episodes", min=1)] = 1,
    split: Annotated[
        str | None, typer.Option("--set", help="an evaluation set's name; default: training tasks")
    ] = None,
    first: Annotated[int, typer.Option(help="the first task", min=0)] = 0,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    tokens: Annotated[bool, typer.Option(help="show each token with its id and log-probability")] = False,
    jsonl: Annotated[bool, typer.Option(help="print one JSON line per trajectory instead")] = False,
) -> None:
    """Watch an agent act, step by step: what it wrote (trained) apart from what it was shown (observed)."""
    from renma.rollout.watch import watch

    watch(
        source,
        recipe,
        overrides or [],
        episodes=n,
        split=split,
        first=first,
        temperature=temperature,
        tokens=tokens,
        jsonl=jsonl,
    )


@plan.command()
@one_line_errors
def algorithm(
    recipe: Annotated[str | None, typer.Argument(help="read what it says; options override it")] = None,
    horizon: Annotated[int | None, typer.Option(help="the most actions of an episode [10]")] = None,
    reward: Annotated[str | None, typer.Option(help="sparse, dense, process or preference [sparse]")] = None,
    verifiable: Annotated[bool | None, typer.Option(help="a program can check the outcome [yes]")] = None,
    group_size: Annotated[int | None, typer.Option(help="attempts at one task [8]")] = None,
    model_size: Annotated[str | None, typer.Option(help="parameters, such as 270M or 7B")] = None,
    memory: Annotated[float | None, typer.Option(help="GB of the device, to see whether a critic fits")] = None,
    tokens: Annotated[int | None, typer.Option(help="the most sampled tokens of an episode")] = None,
    steps: Annotated[str | None, typer.Option(help="explicit: each action is one whole step [implicit]")] = None,
    repeated_states: Annotated[bool | None, typer.Option(help="attempts meet in the same states [no]")] = None,
    staleness: Annotated[int | None, typer.Option(help="the most versions a token may be behind [0]")] = None,
    moe: Annotated[bool | None, typer.Option(help="a mixture of experts [no]")] = None,
    teacher: Annotated[bool | None, typer.Option(help="a better policy of the same vocabulary [no]")] = None,
    success: Annotated[float | None, typer.Option(help="the share that succeeds now, such as 0.3")] = None,
    demonstrations: Annotated[bool | None, typer.Option(help="it can be shown how it is done [no]")] = None,
    online: Annotated[bool | None, typer.Option(help="there is an environment to act in [yes]")] = None,
    families: Annotated[int | None, typer.Option(help="kinds of task in the mix [1]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead")] = False,
) -> None:
    """Which algorithm fits: ranked presets with reasons, and the keys to set in a recipe."""
    given = {name: value for name, value in locals().items() if name not in ("recipe", "as_json")}
    from renma.advice.command import plan_algorithm

    plan_algorithm(recipe, given, as_json=as_json)


@app.command(name="list")
@one_line_errors
def list_command(
    kind: Annotated[str, typer.Argument(help="environments, algorithms, recipes, models, tasks, rewards, …")],
) -> None:
    """What Renma has of a kind, one line each."""
    from renma.listing import print_list

    print_list(kind)


@app.command()
@one_line_errors
def doctor() -> None:
    """What this machine has and lacks, each with how to get it."""
    from renma.doctor import checks, render

    Console().print(render(checks()))


@app.command()
@one_line_errors
def new(
    kind: Annotated[str, typer.Argument(help="what to make: environment")],
    name: Annotated[str, typer.Argument(help="its name, such as my_shop")],
    folder: Annotated[Path, typer.Option(help="where")] = Path("."),
) -> None:
    """Write a working file with a test, to start from."""
    from renma.scaffold import new_environment, recipe_lines

    if kind != "environment":
        raise RenmaError(f"renma new makes an environment, not {kind!r}; say: renma new environment {name}")
    for path in new_environment(name, folder):
        typer.echo(f"wrote {path}")
    typer.echo(recipe_lines(name, folder))


def main() -> None:
    sys.exit(app())


if __name__ == "__main__":
    main()
