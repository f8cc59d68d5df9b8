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
Overrides = Annotated[list[str] | None, typer.Argument(help="overrides: section.key=value", show_default=False)]
Output = Annotated[Path, typer.Option(help="where run folders are made")]
View = Annotated[Shown, typer.Option("--progress", help="how the run is shown")]
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
) -> None:
    """Train a recipe; any leaf can be overridden: renma train quickstart training.steps=50."""
    from renma.recipes import find_recipe
    from renma.training.trainer import Trainer

    trainer = Trainer(find_recipe(recipe), overrides=overrides or (), output=output, progress=progress.value)
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
) -> None:
    """Go on with a run from its last checkpoint."""
    from renma.training.trainer import Trainer

    Trainer(resume=run, overrides=overrides or (), progress=progress.value).fit()


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
