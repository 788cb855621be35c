"""Rows of ranks as a table for a terminal, or as lines of text; a headline above them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from squinchcomm.cli.readings import Reading
from squinchcomm.cli.top_rows import Row

_MEGA = 1e6


def _of(value: float | None, pattern: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value * scale, pattern)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _state(row: Row) -> str:
    if row.problem is not None:
        return f"down: {row.problem}"
    return row.behind or ("ok" if row.rank is not None else "has not joined yet")


# Titles, and what stands below them. Numbers are aligned to the right, those in `_TEXTS` to the left.
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "rank": lambda row: "?" if row.rank is None else str(row.rank),
    "target": lambda row: row.target,
    "coll/s": lambda row: _of(row.collectives_per_s, ".1f"),
    "op": lambda row: row.op or "-",
    "out MB/s": lambda row: _of(row.sent_bytes_per_s, ".2f", 1 / _MEGA),
    "in MB/s": lambda row: _of(row.received_bytes_per_s, ".2f", 1 / _MEGA),
    "ratio": lambda row: _of(row.ratio, ".2f"),
    "wait %": lambda row: _of(row.wait, ".0f", 100),
    "enc %": lambda row: _of(row.encode, ".0f", 100),
    "dec %": lambda row: _of(row.decode, ".0f", 100),
    "flight": lambda row: _of(row.in_flight, ".0f"),
    "failed": lambda row: _of(row.failures, ".0f"),
    "idle s": lambda row: _seconds(row.idle_s),
    "state": _state,
}
_TEXTS = ("target", "op", "state")
_GIVEN_UP = ("flight", "dec %", "enc %", "in MB/s", "target", "op")  # in this order where a terminal is narrow
_STATE_CHARS = 14  # of a state that is cut off, enough for "behind: others"


def headline(rows: list[Row], trouble: str | None) -> str:
    """The job in a line: how many ranks answer, what they do together, who is missing."""
    alive = [row for row in rows if row.problem is None]
    size = max((row.world_size for row in rows), default=0)
    parts = [time.strftime("%H:%M:%S"), f"{len(alive)} of {max(size, len(rows))} ranks answer"]
    known = [row for row in alive if row.sent_bytes_per_s is not None]
    if known:
        parts.append(f"{max(row.collectives_per_s or 0.0 for row in known):.1f} collectives/s")
        parts.append(f"{sum(row.sent_bytes_per_s or 0.0 for row in known) / _MEGA:.2f} MB/s sent by all")
    missing = sorted(set(range(size)) - {row.rank for row in rows})
    if missing and size > len(rows):
        from squinchcomm.cli.trace_compare import named

        parts.append(f"no target was given, or answers, for {named(missing)}")
    if behind := [str(row.rank) for row in alive if row.behind]:
        parts.append(f"behind: {', '.join(behind)}")
    if any(row.failures for row in rows):
        parts.append("calls have failed")
    if trouble:
        parts.append(trouble)
    return " | ".join(parts)


def as_lines(rows: list[Row], trouble: str | None = None) -> list[str]:
    """For a file or a pipe: a headline and titles that begin with "#", then a line a rank."""
    cells = [list(_COLUMNS), *([show(row) for show in _COLUMNS.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"# {headline(rows, trouble)}"]
    for place, row in enumerate(cells):
        padded = (
            cell.ljust(width) if title in _TEXTS else cell.rjust(width)
            for title, cell, width in zip(_COLUMNS, row, widths, strict=True)
        )
        lines.append((("  " if place else "# ") + "  ".join(padded)).rstrip())
    return lines


def as_table(rows: list[Row], trouble: str | None, height: int, width: int) -> Any:
    """For a terminal of so many lines and columns; if not all ranks fit, those in trouble come first, then the lowest."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    room = max(1, height - 4)
    shown = rows
    if len(rows) > room:
        shown = sorted(rows, key=lambda row: not _troubled(row))[:room]
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    columns = _fitting(shown, width)
    for title, need in columns.items():
        least = None if title == "state" else need - 1  # the state alone may be cut off
        justify: Any = "left" if title in _TEXTS else "right"
        table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis", min_width=least)
    for row in shown:
        table.add_row(*(Text(_COLUMNS[title](row)) for title in columns), style=_style(row))
    lines: list[Any] = [Text(headline(rows, trouble), no_wrap=True, overflow="ellipsis"), table]
    if len(shown) < len(rows):
        lines.append(Text(f"... {len(rows) - len(shown)} more ranks; a higher terminal shows them"))
    return Group(*lines)


def _fitting(rows: list[Row], width: int) -> dict[str, int]:
    """Titles of the columns for which there is room, and how much each takes."""
    needs = {title: max(len(title), *(len(show(row)) for row in rows)) + 1 for title, show in _COLUMNS.items()}
    needs["state"] = min(needs["state"], _STATE_CHARS)
    for title in _GIVEN_UP:
        if sum(needs.values()) > width:
            del needs[title]
    return needs


def _troubled(row: Row) -> bool:
    return row.problem is not None or row.behind is not None


def _style(row: Row) -> str | None:
    if row.problem is not None:
        return "red"
    return "bold yellow" if row.behind else None


def answered(readings: Iterable[Reading]) -> bool:
    """Whether any rank could be read."""
    return any(reading.problem is None for reading in readings)
