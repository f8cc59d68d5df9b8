"""The report of a run: one HTML file that needs nothing else, and a learning curve as one SVG file.

Text of models, tools and tasks is hostile: everything goes through `escaped`, and the page's own policy forbids scripts
and any outside resource.
"""

from __future__ import annotations

import os
from pathlib import Path

from renma.errors import RunError
from renma.viewer.run_data import EvaluationPoint, RunData, read_run
from renma.viewer.sections import charts, comparison, headline, recipe, samples, warnings
from renma.viewer.svg import CHART_CSS, Chart, Series, draw, escaped

PAGE_CSS = Path(__file__).with_name("page.css")
REPORT = "report.html"


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run's folder, of whatever the folder holds; returns its path.

    Read: metrics.jsonl, events.jsonl, summary.json, recipe.yaml. Raises RunError when there is no such folder or it
    cannot be written.
    """
    path = run_dir / REPORT
    _write(path, page(read_run(run_dir)))
    return path


def write_curve_svg(run_dir: Path, path: Path) -> Path:
    """Write the run's curve of success as an SVG picture, light or dark as the viewer's system is.

    Raises RunError when the run has no success to draw yet, or the picture cannot be written.
    """
    run = read_run(run_dir)
    curve = success_chart(run)
    if curve is None:
        raise RunError(f"{run_dir} has no measured success to draw; train for a step or evaluate first")
    titled = Chart(f"Success of {run.name} while training", curve.series, True, True, curve.x_label, curve.named_x)
    _write(path, draw(titled, 860, 380, standalone=True))
    return path


def _write(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}; free space or make its folder writable") from error


def page(run: RunData) -> str:
    """The whole page as HTML text."""
    style = CHART_CSS.read_text(encoding="utf-8") + PAGE_CSS.read_text(encoding="utf-8")
    body = [
        headline(run),
        warnings(run),
        comparison(run),
        _curves(run),
        samples(run),
        recipe(run),
        _notes(run),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escaped(run.name)} · Renma</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(part for part in body if part)}</main></body></html>\n"
    )


def success_chart(run: RunData) -> Chart | None:
    """Success of the training batches and of every evaluation set, with its intervals."""
    training = run.series("success")
    steps = [x for x, _ in training] + [float(p.step) for points in run.evaluations.values() for p in points]
    if not steps:
        return None
    lead = -0.09 * max(1.0, max(steps))  # where the policy before the cold start is drawn
    series = [Series("training batches", training, 0, smooth=True)] if training else []
    based = False
    for index, (name, found) in enumerate(run.evaluations.items()):
        based = based or any(point.base for point in found)
        series.append(_evaluation_series(name, found, 1 + index % 4, lead))
    return Chart(
        "Success",
        series,
        in_percent=True,
        from_zero=True,
        x_label="training step" + (" (base: before the cold start)" if based else ""),
        named_x=((lead, "base"),) if based else (),
    )


def _evaluation_series(name: str, found: list[EvaluationPoint], colour: int, lead: float) -> Series:
    return Series(
        name,
        [(lead if point.base else float(point.step), point.success) for point in found],
        colour,
        [point.low for point in found],
        [point.high for point in found],
        marks=True,
        dashed_to=0.0 if any(point.base for point in found) else None,
    )


def _curves(run: RunData) -> str:
    return charts(run, success_chart(run))


def _notes(run: RunData) -> str:
    if not run.notes:
        return ""
    lines = "".join(f"<li>{escaped(note)}</li>" for note in run.notes)
    return f'<section class="notes"><h2>Left out</h2><ul>{lines}</ul></section>'
