"""The table of `squinchcomm bench`, in the conventions of nccl-tests: plain ASCII, everything but data behind a `#`."""

from __future__ import annotations

import datetime
import platform
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

_COLUMNS = (
    # heading, unit, width
    ("size", "(B)", 11),
    ("count", "(elements)", 11),
    ("type", "", 9),
    ("redop", "", 8),
    ("root", "", 5),
    ("time", "(us)", 11),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 8),
    ("wire", "(B)", 11),
    ("ratio", "", 7),
    ("wirebw", "(GB/s)", 8),
    ("max_relerr", "", 11),
    ("codec", "", 12),
)


@dataclass
class Row:
    """One measured point.

    Attributes:
        op: Collective.
        codec: As asked for; "none" is lossless.
        size_bytes: Bytes of the whole uncompressed array.
        count: Its elements.
        dtype: Its element type.
        reduction: "" if the collective has none.
        root: -1 if it has none.
        times_us: Of each iteration, in microseconds: that of the slowest rank.
        factor: busbw / algbw.
        wire_bytes: Bytes, headers included, that the rank that sends most sent in one call; those of all ranks for gather.
        wrong: Elements out of bounds, on all ranks; None if not checked.
        max_relerr: Largest error as a fraction of the largest expected magnitude; None if not checked.
    """

    op: str
    codec: str
    size_bytes: int
    count: int
    dtype: str
    reduction: str
    root: int
    times_us: list[float]
    factor: float
    wire_bytes: int
    wrong: int | None
    max_relerr: float | None

    @property
    def time_us(self) -> float:
        """Median over iterations."""
        return statistics.median(self.times_us)

    @property
    def algbw(self) -> float:
        """Uncompressed bytes per time, GB/s."""
        return self.size_bytes / self.time_us / 1e3

    @property
    def busbw(self) -> float:
        """Algbw as the link would see it if nothing were compressed, GB/s."""
        return self.algbw * self.factor

    @property
    def wirebw(self) -> float:
        """What that rank's link really carried, GB/s."""
        return self.wire_bytes / self.time_us / 1e3

    @property
    def ratio(self) -> float:
        """Bytes of a lossless, bandwidth-optimal algorithm per byte on the wire."""
        return self.size_bytes * self.factor / self.wire_bytes if self.wire_bytes else 0.0

    def as_json(self) -> dict[str, Any]:
        """All of it, derived numbers included."""
        derived = {"time_us": self.time_us, "algbw_GBps": self.algbw, "busbw_GBps": self.busbw}
        return asdict(self) | derived | {"wirebw_GBps": self.wirebw, "ratio": self.ratio}

    def __str__(self) -> str:
        cells = (
            str(self.size_bytes),
            str(self.count),
            self.dtype,
            self.reduction or "none",
            str(self.root),
            f"{self.time_us:.2f}" if self.time_us < 1e6 else f"{self.time_us:.0f}",
            f"{self.algbw:.3f}",
            f"{self.busbw:.3f}",
            "N/A" if self.wrong is None else str(self.wrong),
            str(self.wire_bytes),
            f"{self.ratio:.2f}",
            f"{self.wirebw:.3f}",
            "N/A" if self.max_relerr is None else f"{self.max_relerr:.1e}",
            self.codec,
        )
        return " ".join(cell.rjust(width) for cell, (_, _, width) in zip(cells, _COLUMNS, strict=True))


def facts(settings: dict[str, Any]) -> dict[str, Any]:
    """What a reader needs to judge the numbers: versions, machine, settings."""
    import zmq

    packages = {name: version(name) for name in ("squinchcomm", "numpy", "numba", "pyzmq")}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["squinchcomm", *sys.argv[1:]],
        "versions": {"python": platform.python_version(), **packages, "libzmq": zmq.zmq_version()},
        "machine": {"host": platform.node(), "system": platform.platform(), "processor": _processor()},
        "settings": settings,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    except OSError:
        return platform.machine()


def header(known: dict[str, Any]) -> list[str]:
    """Lines above all tables."""
    versions = " ".join(f"{name} {number}" for name, number in known["versions"].items())
    machine, settings = known["machine"], known["settings"]
    return [
        f"# squinchcomm bench  {known['date']}",
        f"# versions: {versions}",
        f"# machine: {machine['host']}, {machine['processor']}, {settings['cores']} cores, {machine['system']}",
        *(f"# {name}: {value}" for name, value in settings.items() if name != "cores"),
        "# time: slowest rank of each iteration, median over iterations; GB = 1e9 bytes",
        "# algbw = size / time; busbw = algbw * factor; size is that of the uncompressed array, so busbw may exceed the link",
        "# wire: what the rank that sends most sends in a call (gather: all ranks); wirebw = wire / time",
        "# ratio = size * factor / wire = busbw / wirebw; max_relerr: largest error / largest expected magnitude",
    ]


def heading(op: str, ranks: int, factor: float) -> list[str]:
    """Lines above the table of one collective."""
    titles = " ".join(title.rjust(width) for title, _, width in _COLUMNS)
    units = " ".join(unit.rjust(width) for _, unit, width in _COLUMNS)
    return [
        "#",
        f"# {op}, {ranks} {'rank' if ranks == 1 else 'ranks'}, busbw factor {factor:.4g}",
        f"#{titles[1:]}",
        f"#{units[1:]}",
    ]


def footer(rows: Iterable[Row]) -> list[str]:
    """Lines below all tables: average busbw by codec, elements out of bounds, OK or FAILED."""
    rows = list(rows)
    lines = ["#"]
    for codec in dict.fromkeys(row.codec for row in rows):
        average = statistics.fmean(row.busbw for row in rows if row.codec == codec)
        lines.append(f"# Avg bus bandwidth    : {average:.4f} GB/s ({codec})")
    wrong = [row.wrong for row in rows if row.wrong is not None]
    verdict = "not checked" if not wrong else f"{sum(wrong)} {'FAILED' if any(wrong) else 'OK'}"
    return [*lines, f"# Out of bounds values : {verdict}"]
