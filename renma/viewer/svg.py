"""Charts as plain SVG text, drawn by hand: no script, no outside font; colours come from chart.css, light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from renma.viewer.text import number, percent, printable

CHART_CSS = Path(__file__).with_name("chart.css")
MOST_POINTS = 400  # more are averaged in runs of neighbours

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line. `colour` 0 to 4 (chart.css). `low`, `high`: ends of each point's interval, drawn as whiskers.

    smooth: draw the values faintly and their running mean over them. marks: a dot at each point, with a tooltip.
    dashed_to: the part of the line left of this x is dashed.
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    smooth: bool = False
    marks: bool = False
    dashed_to: float | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    series: Sequence[Series]
    in_percent: bool = False
    from_zero: bool = False
    x_label: str = "training step"
    named_x: Sequence[tuple[float, str]] = field(default_factory=tuple)


def escaped(text: object) -> str:
    """Any text, safe inside HTML or SVG, in an attribute too."""
    return html.escape(printable(str(text)), quote=True)


def draw(chart: Chart, width: int, height: int, *, standalone: bool = False) -> str:
    """The chart as an `<svg>` element of the given coordinates, scaling with its box.

    standalone: with its own colours, background, title and legend, for a file of its own.
    """
    top = (58 if len(chart.series) > 1 else 40) if standalone else 10
    frame = _Frame(chart, width, height, top, 12.0 if standalone else 0.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" class="chart" role="img" '
        f'aria-label="{escaped(chart.title)}">'
    ]
    if standalone:
        parts.append(f"<style>{CHART_CSS.read_text(encoding='utf-8')}</style>")
        parts.append(f'<rect class="paper" width="{width}" height="{height}" rx="10"/>')
        parts.append(f'<text class="title" x="16" y="26">{escaped(chart.title)}</text>')
        parts.append(_legend(chart, 16, 46) if len(chart.series) > 1 else "")
    parts.append(frame.axes())
    parts += [frame.line(series) for series in chart.series if series.points]
    parts.append("</svg>")
    return "".join(parts)


def interval_mark(success: float, low: float, high: float, colour: int) -> str:
    """A dot with its interval on a scale of 0 to 1: one row of a before/after comparison."""
    x, left, right = (4 + 192 * min(1.0, max(0.0, value)) for value in (success, low, high))
    grid = "".join(f'<line class="grid" x1="{4 + 48 * i}" x2="{4 + 48 * i}" y1="1" y2="21"/>' for i in range(5))
    return (
        f'<svg viewBox="0 0 200 22" class="interval" role="img" aria-label="{percent(success)}, from '
        f'{percent(low)} to {percent(high)}">{grid}<line class="whisker c{colour}" x1="{left:.1f}" x2="{right:.1f}" '
        f'y1="11" y2="11"/><circle class="dot c{colour}" cx="{x:.1f}" cy="11" r="4.5"/></svg>'
    )


class _Frame:
    """The plot's area: from data to coordinates."""

    def __init__(self, chart: Chart, width: int, height: int, top: int, margin: float) -> None:
        self.chart = chart
        xs = [x for series in chart.series for x, _ in series.points]
        ys = [y for series in chart.series for _, y in series.points]
        ys += [end for series in chart.series for end in (*series.low, *series.high) if end is not None]
        self.x_low, self.x_high = (min(xs), max(xs)) if xs else (0.0, 1.0)
        if 0 < self.x_low <= 1 < self.x_high:
            self.x_low = 0.0  # steps count from 1; an axis from 0 has rounder ticks
        if self.x_high == self.x_low:
            self.x_low, self.x_high = self.x_low - 0.5, self.x_high + 0.5
        low, high = (min(ys), max(ys)) if ys else (0.0, 1.0)
        if chart.from_zero and low == high == 0.0:
            high = 1.0  # nothing but zeros lies on the bottom line, not in the middle of an axis below 0
        self.y_ticks = ticks(min(0.0, low) if chart.from_zero else low, high, 4)
        self.y_low, self.y_high = self.y_ticks[0], self.y_ticks[-1]
        labels = [self._y_text(tick) for tick in self.y_ticks]
        self.left = margin + 14 + 6.4 * max(map(len, labels))
        self.right, self.top, self.bottom = width - 14.0 - margin, float(top), height - 38.0

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * (value - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * (value - self.y_low) / (self.y_high - self.y_low)

    def _y_text(self, value: float) -> str:
        return f"{100 * value:.4g} %" if self.chart.in_percent else number(0.0 if abs(value) < 1e-12 else value)

    def axes(self) -> str:
        parts = []
        for tick in self.y_ticks:
            y = self.y(tick)
            kind = "axis" if tick == self.y_low else "grid"
            parts.append(f'<line class="{kind}" x1="{self.left:.1f}" x2="{self.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="label" x="{self.left - 7:.1f}" y="{y + 4:.1f}" text-anchor="end">'
                f"{self._y_text(tick)}</text>"
            )
        named = list(self.chart.named_x)
        room = int((self.right - self.left) / 65)
        first = max(self.x_low, 0.0) if named else self.x_low
        steps = [tick for tick in ticks(first, self.x_high, max(2, room), whole=True) if first <= tick <= self.x_high]
        for tick, text in [*named, *((tick, f"{tick:g}") for tick in steps)]:
            x = self.x(tick)
            parts.append(
                f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{self.bottom:.1f}" y2="{self.bottom + 4:.1f}"/>'
                f'<text class="label" x="{x:.1f}" y="{self.bottom + 17:.1f}" text-anchor="middle">'
                f"{escaped(text)}</text>"
            )
        middle = (self.left + self.right) / 2
        parts.append(
            f'<text class="label quiet" x="{middle:.1f}" y="{self.bottom + 32:.1f}" text-anchor="middle">'
            f"{escaped(self.chart.x_label)}</text>"
        )
        return "".join(parts)

    def line(self, series: Series) -> str:
        colour = f"c{series.colour}"
        parts = []
        if series.smooth and len(series.points) > 8:
            parts.append(self._path(thinned(series.points), f"line faint {colour}"))
            parts.append(self._path(thinned(running_mean(series.points)), f"line {colour}"))
        elif series.marks:
            parts += self._marked(series, colour)
        else:
            parts.append(self._path(thinned(series.points), f"line {colour}"))
        if len(series.points) == 1 and not series.marks:
            x, y = series.points[0]
            parts.append(f'<circle class="dot {colour}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3"/>')
        return "".join(parts)

    def _marked(self, series: Series, colour: str) -> list[str]:
        edge = -math.inf if series.dashed_to is None else series.dashed_to
        parts = [
            self._path([point for point in series.points if point[0] <= edge], f"line dashed {colour}"),
            self._path([point for point in series.points if point[0] >= edge], f"line {colour}"),
        ]
        ends = zip(series.low or [None] * len(series.points), series.high or [None] * len(series.points), strict=True)
        for (x, y), (low, high) in zip(series.points, ends, strict=True):
            told = f"{series.name}, {_place(self.chart, x)}: {self._y_value(y)}"
            if low is not None and high is not None:
                parts.append(
                    f'<line class="whisker {colour}" x1="{self.x(x):.1f}" x2="{self.x(x):.1f}" '
                    f'y1="{self.y(low):.1f}" y2="{self.y(high):.1f}"/>'
                )
                told += f" ({self._y_value(low)} to {self._y_value(high)})"
            parts.append(
                f'<circle class="dot {colour}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4">'
                f"<title>{escaped(told)}</title></circle>"
            )
        return parts

    def _y_value(self, value: float) -> str:
        return percent(value) if self.chart.in_percent else number(value)

    def _path(self, points: Sequence[Point], css: str) -> str:
        if len(points) < 2:
            return ""
        steps = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f'<polyline class="{css}" points="{steps}"/>'


def _place(chart: Chart, x: float) -> str:
    return dict(chart.named_x).get(x) or f"step {x:g}"


def _legend(chart: Chart, x: float, y: float) -> str:
    parts = []
    for series in chart.series:
        parts.append(f'<line class="line c{series.colour}" x1="{x}" x2="{x + 16}" y1="{y - 4}" y2="{y - 4}"/>')
        if series.marks:
            parts.append(f'<circle class="dot c{series.colour}" cx="{x + 8}" cy="{y - 4}" r="3.5"/>')
        parts.append(f'<text class="label" x="{x + 22}" y="{y}">{escaped(series.name)}</text>')
        x += 22 + 6.3 * len(series.name) + 18
    return "".join(parts)


def ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """About `count` round numbers from at or below `low` to at or above `high`, evenly apart; at least two."""
    span = high - low
    if span <= abs(high) * 1e-9:
        span = abs(high) if high else 1.0
        low, high = low - span / 2, high + span / 2
    rough = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def running_mean(points: Sequence[Point]) -> list[Point]:
    """Centred mean over about a tenth of the points (at least 5), shorter at the ends."""
    half = max(2, len(points) // 20)
    smooth = []
    for i, (x, _) in enumerate(points):
        reach = min(half, max(i, 1), max(len(points) - 1 - i, 1))
        window = [y for _, y in points[max(0, i - reach) : i + reach + 1]]
        smooth.append((x, math.fsum(window) / len(window)))
    return smooth


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most MOST_POINTS points: neighbours are averaged, both coordinates."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(len(points) / MOST_POINTS)
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(math.fsum(x for x, _ in run) / len(run), math.fsum(y for _, y in run) / len(run)) for run in runs]
