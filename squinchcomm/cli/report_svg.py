"""Charts of a report as SVG inside HTML. Colours are classes, so that the page's light and dark style sets them."""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise

from squinchcomm.cli.report_model import MOST_LINES, Chart, HeatMap, Points, quantity

WIDTH, HEIGHT = 620, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 12, 10, 28
_ROW, _MOST_ROWS = 16, 64
_LABEL_CHARS = 9


class _Axes:
    """Where moments and values lie in the picture."""

    def __init__(self, begin: float, end: float, top: float, height: float) -> None:
        self.begin, self.seconds = begin, max(end - begin, 1e-3)
        self.top, self.height = top, height

    def x(self, at: float) -> float:
        share = min(max((at - self.begin) / self.seconds, 0.0), 1.0)
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        return round(_TOP + (1 - value / self.top) * (self.height - _TOP - _BOTTOM), 1)


def chart(drawn: Chart, begin: float, end: float) -> str:
    """Lines, with a legend below if there are several; the time axis counts from `begin`."""
    values = [value for points in drawn.lines.values() for _, value in points] + [high for *_, high in drawn.band]
    if not values:
        return _empty()
    levels = [drawn.level[0]] if drawn.level and drawn.level[0] <= 2 * max(values) else []
    axes = _Axes(begin, end, _ceiling(max([*values, *levels])), HEIGHT)
    parts = [_frame(axes, drawn.unit), _times(axes)]
    if drawn.band:
        parts.append(_band(axes, drawn.band))
    if levels and drawn.level:
        y = axes.y(drawn.level[0])
        parts.append(f'<line class="level" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{WIDTH - _RIGHT}" y="{y - 4}" text-anchor="end">{escape(drawn.level[1])}</text>')
    for index, (name, points) in enumerate(drawn.lines.items()):
        parts.append(_line(axes, points, f"c{index % MOST_LINES}", name, drawn))
    return _picture(HEIGHT, drawn.title, parts) + _legend(list(drawn.lines), bool(drawn.band))


def heat_map(drawn: HeatMap, begin: float, end: float) -> str:
    """A row of cells for each name; the scale is said below."""
    rows = dict(list(drawn.rows.items())[:_MOST_ROWS])
    values = [value for points in rows.values() for _, value in points]
    if not values:
        return _empty()
    height = _TOP + _BOTTOM + _ROW * len(rows)
    axes, most = _Axes(begin, end, 1.0, height), max(values)
    parts = [_times(axes)]
    for place, (name, points) in enumerate(rows.items()):
        y = _TOP + place * _ROW
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 12}" text-anchor="end">{escape(_short(name))}</text>')
        for at, value in points:
            left, right = axes.x(at), axes.x(at + drawn.width_s)
            strength = round(value / most, 3) if most else 0.0
            parts.append(
                f'<rect class="cell" x="{left}" y="{y}" width="{max(right - left, 0.5):.1f}" height="{_ROW - 2}" '
                f'fill-opacity="{strength}"><title>{escape(name)}, {_clock(at - begin)}: {quantity(value, drawn.unit)}</title></rect>'
            )
    hidden = len(drawn.rows) - len(rows)
    more = f"; {hidden} more rows are left out" if hidden else ""
    scale = f'<p class="legend"><span class="scale"></span> 0 to {quantity(most, drawn.unit)}{more}</p>'
    return _picture(height, drawn.title, parts) + scale


def _picture(height: float, title: str, parts: list[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _empty() -> str:
    return '<p class="empty">no values</p>'


def _frame(axes: _Axes, unit: str) -> str:
    lines = []
    for step in range(5):
        value = axes.top * step / 4
        y = axes.y(value)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{quantity(value, unit)}</text>')
    return "".join(lines)


def _times(axes: _Axes) -> str:
    y = axes.height - _BOTTOM + 18
    unit_s = next(size for size in (1.0, 60.0, 3600.0, 86400.0) if axes.seconds < 120 * size or size == 86400.0)
    step_s = _ceiling(axes.seconds / unit_s / 6) * unit_s
    texts = []
    for step in range(int(axes.seconds / step_s) + 1):
        x = axes.x(axes.begin + step * step_s)
        anchor = "start" if step == 0 else "end" if x > WIDTH - 30 else "middle"
        texts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{_clock(step * step_s)}</text>')
    return "".join(texts)


def _line(axes: _Axes, points: Points, colour: str, name: str, drawn: Chart) -> str:
    """A line with gaps where values are missing, and marks that show their value to a resting pointer."""
    ordered = sorted(points)
    steps = sorted(later - earlier for (earlier, _), (later, _) in pairwise(ordered))
    gap_s = 0.0 if drawn.dots or not steps else 4 * steps[len(steps) // 2]
    path, before = [], -math.inf
    for at, value in ordered:
        path.append(f"{'L' if at - before <= gap_s else 'M'}{axes.x(at)} {axes.y(value)}")
        before = at
    marks = "".join(
        f'<circle cx="{axes.x(at)}" cy="{axes.y(value)}" r="{2 if drawn.dots or len(ordered) <= 60 else 1.2}">'
        f"<title>{escape(name)}, {_clock(at - axes.begin)}: {quantity(value, drawn.unit)}</title></circle>"
        for at, value in ordered
    )
    return f'<g class="line {colour}" data-line="{escape(name)}"><path d="{"".join(path)}"/>{marks}</g>'


def _band(axes: _Axes, band: list[tuple[float, float, float]]) -> str:
    upper = [f"{axes.x(at)},{axes.y(high)}" for at, _, high in band]
    lower = [f"{axes.x(at)},{axes.y(low)}" for at, low, _ in reversed(band)]
    return f'<polygon class="band" points="{" ".join([*upper, *lower])}"/>'


def _legend(names: list[str], band: bool) -> str:
    keys = [f'<span class="key c{index % MOST_LINES}"></span>{escape(name)}' for index, name in enumerate(names)]
    if band:
        keys.append('<span class="key wide"></span>all ranks lie within')
    return f'<p class="legend">{" ".join(keys)}</p>' if len(keys) > 1 else ""


def _ceiling(value: float) -> float:
    """A round number that is not below `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10) if step * power >= value * 0.9999)


def _clock(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 172800 else f"{seconds / 86400:.3g} d"


def _short(name: str) -> str:
    return name if len(name) <= _LABEL_CHARS else f"{name[: _LABEL_CHARS - 1]}…"
