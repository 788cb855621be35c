"""What a report consists of, wherever its numbers are from: facts, charts over time, and tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

Points = list[tuple[float, float]]  # Unix time, value

MOST_LINES = 6  # more in one chart cannot be told apart


@dataclass
class Chart:
    """Lines over time.

    Attributes:
        title: What is drawn.
        unit: Of the values: "B/s", "s", "%" or "" for plain numbers.
        note: How to read it.
        lines: By name.
        band: Smallest and largest over all ranks, instead of a line for each; the lines are then their median.
        level: A value worth a dashed line, and what it means.
        dots: Draw values by themselves: there is nothing between them.
    """

    title: str
    unit: str
    note: str
    lines: dict[str, Points] = field(default_factory=dict)
    band: list[tuple[float, float, float]] = field(default_factory=list)
    level: tuple[float, str] | None = None
    dots: bool = False


@dataclass
class HeatMap:
    """A row for each name over time; the stronger the colour, the more.

    Attributes:
        title: What is drawn.
        unit: Of the values.
        note: How to read it.
        width_s: Seconds that a cell covers.
        rows: By name: begin of each cell, Unix time, and its value.
    """

    title: str
    unit: str
    note: str
    width_s: float
    rows: dict[str, Points] = field(default_factory=dict)


@dataclass
class Table:
    """Texts in rows; columns in `texts` are words, all others numbers. Rows whose place is in `bad` tell of trouble."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    texts: tuple[str, ...] = ()
    note: str = ""
    bad: set[int] = field(default_factory=set)
    nothing: str = "none"


@dataclass
class Section:
    """A part of the page with its own headline, such as one communicator."""

    title: str
    facts: dict[str, str] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    parts: list[Chart | HeatMap | Table] = field(default_factory=list)


@dataclass
class Report:
    """The page."""

    title: str
    source: str
    sections: list[Section]
    notes: list[str] = field(default_factory=list)


def by_rank(title: str, unit: str, note: str, ranks: dict[str, Points]) -> Chart:
    """A line for each rank, or the range and the median if there are many."""
    chart = Chart(title, unit, note)
    if len(ranks) <= MOST_LINES:
        chart.lines = ranks
        return chart
    at_time: dict[float, list[float]] = {}
    for points in ranks.values():
        for at, value in points:
            at_time.setdefault(at, []).append(value)
    chart.band = [(at, min(values), max(values)) for at, values in sorted(at_time.items())]
    chart.lines = {f"median of {len(ranks)} ranks": [(at, median(values)) for at, values in sorted(at_time.items())]}
    return chart


def span(parts: Iterable[Chart | HeatMap | Table]) -> tuple[float, float]:
    """First and last moment that any of the charts shows; (0, 0) without any."""
    begins, ends = [], []
    for part in parts:
        if isinstance(part, Table):
            continue
        width_s = part.width_s if isinstance(part, HeatMap) else 0.0
        for points in (part.lines if isinstance(part, Chart) else part.rows).values():
            begins += [at for at, _ in points[:1]]
            ends += [at + width_s for at, _ in points[-1:]]
    return min(begins, default=0.0), max(ends, default=0.0)


def quantity(value: float, unit: str) -> str:
    """A number with its unit, in the prefix that reads best: "3.4 MB/s", "12 ms", "41 %"."""
    if unit in ("B", "B/s"):
        for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= size:
                return f"{value / size:.3g} {prefix}{unit}"
        return f"{value:.3g} {unit}"
    if unit == "s":
        for size, prefix in ((1.0, ""), (1e-3, "m"), (1e-6, "µ")):
            if abs(value) >= size:
                return f"{value / size:.4g} {prefix}s" if size < 1 else f"{value:.4g} s"
        return "0 s" if value == 0 else f"{value * 1e6:.2g} µs"
    return f"{value:.3g} {unit}".rstrip()
