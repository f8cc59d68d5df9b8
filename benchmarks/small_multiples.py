"""Small charts in rows and columns as one SVG file: plain text, readable in light and dark, no library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from renma.viewer.svg import CHART_CSS, Point, escaped, ticks

WIDTH, PANEL = 400, 190  # of one panel, its title and axis included
GAP, HEAD = 16, 84
LABEL = 26  # the least room between two marks on the x axis


@dataclass(frozen=True, slots=True)
class Panel:
    """`lines`: name of the line -> its points, ascending in x; y is drawn from 0. note: in place of lines."""

    title: str
    x_label: str
    lines: dict[str, Sequence[Point]]
    note: str = ""


def draw_panels(title: str, subtitle: str, names: Sequence[str], panels: Sequence[Panel], columns: int = 2) -> str:
    """The panels, row after row, as a whole SVG file. names: the lines, in the order of their colours (0 is grey)."""
    rows = -(-len(panels) // columns)
    width, height = GAP + columns * (WIDTH + GAP), HEAD + rows * (PANEL + GAP) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escaped(title)}">',
        f"<style>{CHART_CSS.read_text(encoding='utf-8')}.head {{ fill: var(--ink); font-size: 12.5px; }}</style>",
        f'<rect class="paper" width="{width}" height="{height}" rx="10"/>',
        f'<text class="title" x="{GAP}" y="26">{escaped(title)}</text>',
        f'<text class="label" x="{GAP}" y="45">{escaped(subtitle)}</text>',
        _legend(names, GAP, 68),
    ]
    for number, panel in enumerate(panels):
        x, y = GAP + number % columns * (WIDTH + GAP), HEAD + number // columns * (PANEL + GAP)
        parts.append(f'<g transform="translate({x},{y})">{_panel(panel, names)}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _legend(names: Sequence[str], x: float, y: float) -> str:
    parts = []
    for colour, name in enumerate(names):
        parts.append(
            f'<line class="line c{colour}" x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}"/>'
            f'<circle class="dot c{colour}" cx="{x + 9}" cy="{y - 4}" r="3.5"/>'
            f'<text class="label" x="{x + 24}" y="{y}">{escaped(name)}</text>'
        )
        x += 24 + 6.4 * len(name) + 22
    return "".join(parts)


def _panel(panel: Panel, names: Sequence[str]) -> str:
    parts = [f'<text class="head" x="0" y="14">{escaped(panel.title)}</text>']
    points = [point for line in panel.lines.values() for point in line]
    if not points:
        return "".join([*parts, f'<text class="label" x="0" y="40">{escaped(panel.note)}</text>'])
    marks = sorted({x for x, _ in points})
    low, high = marks[0], marks[-1] if marks[-1] > marks[0] else marks[0] + 1
    scale = ticks(0.0, max(y for _, y in points), 3)
    left, right, top, bottom = 44.0, WIDTH - 12.0, 26.0, PANEL - 38.0

    def across(x: float) -> float:
        return left + (right - left) * (x - low) / (high - low)

    def up(y: float) -> float:
        return bottom - (bottom - top) * y / scale[-1]

    for tick in scale:
        kind = "grid" if tick else "axis"
        parts.append(
            f'<line class="{kind}" x1="{left}" x2="{right}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
            f'<text class="label" x="{left - 7}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    last = float("inf")
    for x in reversed(marks):  # the largest always has its number; crowded ones at the left lose theirs
        parts.append(f'<line class="axis" x1="{across(x):.1f}" x2="{across(x):.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        if last - across(x) >= LABEL:
            last = across(x)
            parts.append(f'<text class="label" x="{last:.1f}" y="{bottom + 17}" text-anchor="middle">{x:g}</text>')
    parts.append(
        f'<text class="label quiet" x="{(left + right) / 2}" y="{bottom + 32}" text-anchor="middle">'
        f"{escaped(panel.x_label)}</text>"
    )
    for colour, name in enumerate(names):
        line = panel.lines.get(name, ())
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        if len(line) > 1:
            parts.append(f'<polyline class="line c{colour}" points="{path}"/>')
        parts += [
            f'<circle class="dot c{colour}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5">'
            f"<title>{escaped(name)}, {x:g}: {y:.3g} s</title></circle>"
            for x, y in line
        ]
    return "".join(parts)
