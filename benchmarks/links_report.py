"""From raw times to rows, a table and a report."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

BASELINES = ("gloo-f32", "gloo-bf16")
# Largest error allowed: root mean square relative to the sum's, and of any element relative to the largest input
# and the number of times a value is rounded. A 6-bit code is off by at most 6.7 % of its block's largest value.
_RMS_BOUND = {
    "gloo-f32": 1e-6,
    "none": 1e-6,
    "gloo-bf16": 1e-2,
    "bf16": 1e-2,
    "squinch6": 0.1,
    "auto": 0.1,
    "squinch6-sr": 0.15,
}
_WORST_BOUND = {
    "gloo-f32": 1e-5,
    "none": 1e-5,
    "gloo-bf16": 0.02,
    "bf16": 0.02,
    "squinch6": 0.07,
    "auto": 0.07,
    "squinch6-sr": 0.14,
}


@dataclass(frozen=True)
class Row:
    """One contender at one size on one kind of link.

    Times are medians over repeats, from the last rank's call to the last rank's return, in seconds.
    """

    link: str
    rate: float | None  # bits/s
    ranks: int
    hosts: int
    size: int  # bytes of the float32 array
    contender: str
    repeats: int
    time_s: float
    quartiles_s: tuple[float, float]
    algbw: float  # bytes/s of the float32 array
    busbw: float
    limit_s: float | None  # float32 bytes at the link's rate: 2 (h-1)/h S / rate for h hosts
    sent_bytes: float | None  # that left a rank's interface, the mean over ranks; None where it cannot be told apart
    speedup: dict[str, tuple[float, float, float]]  # over each baseline: median, lower and upper quartile of pairs
    rms_error: float
    worst_error: float
    identical: bool
    ok: bool
    raw_s: list[float]


def rows(
    link: str,
    rate: float | None,
    size: int,
    answers: list[dict[str, Any]],
    checks: list[dict[str, Any]],
    hosts: int | None = None,
) -> list[Row]:
    """Rows of one cell from what the ranks answered."""
    ranks = len(answers)
    hosts = hosts or ranks
    times = {name: _span(answers, name) for name in answers[0]["times"]}
    made = []
    for name, seconds in times.items():
        low, middle, high = (float(value) for value in np.percentile(seconds, (25, 50, 75)))
        sent = np.array([answer["sent"][name] for answer in answers], dtype=float)
        parts = [check[name] for check in checks]
        codec = name.partition("/")[0]
        square_sum = sum(part["square_sum"] for part in parts)
        rms = (sum(part["square_error"] for part in parts) / square_sum) ** 0.5 if square_sum else 0.0
        worst = max(part["worst"] for part in parts)
        identical = len({part["checksum"] for part in parts}) == 1
        accurate = rms <= _RMS_BOUND.get(codec, 0.1) and worst <= _WORST_BOUND.get(codec, 0.1) * (2 * ranks - 1)
        pairs = {base: times[base] / seconds for base in BASELINES if base in times and base != name}
        factor = 2 * (ranks - 1) / ranks
        made.append(
            Row(
                link=link,
                rate=rate,
                ranks=ranks,
                hosts=hosts,
                size=size,
                contender=name,
                repeats=len(seconds),
                time_s=middle,
                quartiles_s=(low, high),
                algbw=size / middle,
                busbw=size / middle * factor,
                limit_s=2 * (hosts - 1) / hosts * size * 8 / rate if rate else None,
                sent_bytes=float(np.median(sent.mean(axis=0))) if sent.any() else None,
                speedup={base: _median_and_quartiles(ratio) for base, ratio in pairs.items()},
                rms_error=rms,
                worst_error=worst,
                identical=identical,
                ok=accurate and identical,
                raw_s=[float(value) for value in seconds],
            )
        )
    return made


def _span(answers: list[dict[str, Any]], name: str) -> np.ndarray:
    """Seconds from the last rank's call to the last rank's return, of each repeat. All ranks read the same clock."""
    starts = np.array([answer["starts"][name] for answer in answers])
    ends = starts + np.array([answer["times"][name] for answer in answers])
    span: np.ndarray = ends.max(axis=0) - starts.max(axis=0)
    return span


def _median_and_quartiles(values: np.ndarray) -> tuple[float, float, float]:
    low, middle, high = (float(value) for value in np.percentile(values, (25, 50, 75)))
    return middle, low, high


COLUMNS = (
    f"{'link':>9} {'ranks':>5} {'hosts':>5} {'size(B)':>10} {'contender':<13} {'n':>3} {'time(us)':>10} {'quartiles(us)':>21}"
    f" {'algbw(GB/s)':>11} {'busbw(GB/s)':>11} {'limit(us)':>10} {'sent(B)':>10} {'link%':>5}"
    f" {'x gloo-f32 [quartiles]':>23} {'x gloo-bf16 [quartiles]':>23} {'rms_err':>8} {'#wrong':>6}"
)


def line(row: Row) -> str:
    """`row` as a line of the table under `COLUMNS`."""
    quartiles = "{:.0f}..{:.0f}".format(*(1e6 * value for value in row.quartiles_s))
    limit = f"{1e6 * row.limit_s:.0f}" if row.limit_s else "-"
    sent = f"{row.sent_bytes:.0f}" if row.sent_bytes is not None else "-"
    link = f"{100 * row.sent_bytes * 8 / row.rate / row.time_s:.0f}" if row.rate and row.sent_bytes else "-"
    ratios = ["{:.2f} [{:.2f}..{:.2f}]".format(*row.speedup[base]) if base in row.speedup else "-" for base in BASELINES]
    return (
        f"{row.link:>9} {row.ranks:>5} {row.hosts:>5} {row.size:>10} {row.contender:<13} {row.repeats:>3} {1e6 * row.time_s:>10.0f}"
        f" {quartiles:>21} {row.algbw / 1e9:>11.3f} {row.busbw / 1e9:>11.3f} {limit:>10} {sent:>10} {link:>5}"
        f" {ratios[0]:>23} {ratios[1]:>23} {row.rms_error:>8.1e} {0 if row.ok else 1:>6}"
    )


def environment(links: str, script: str = "links.py") -> dict[str, Any]:
    """Machine, versions and command of this run."""
    model = next(
        (text.split(":", 1)[1].strip() for text in _lines("/proc/cpuinfo") if text.startswith("model name")), "unknown"
    )
    memory = next((int(text.split()[1]) / 2**20 for text in _lines("/proc/meminfo") if text.startswith("MemTotal")), 0.0)
    versions = {name: _version(name) for name in ("squinchcomm", "torch", "numpy", "numba", "pyzmq")}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{script}", *sys.argv[1:]]),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "links": links,
    }


def header(settings: dict[str, Any]) -> list[str]:
    """Lines that start with '#', ahead of the table."""
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
    return [
        f"# {settings['command']}",
        f"# {settings['date']}, {settings['processor']}, {settings['cores']} cores, {settings['memory_gib']} GiB, "
        f"Linux {settings['kernel']}, Python {settings['python']}",
        f"# {versions}",
        f"# links: {settings['links']}",
        "# all-reduce, sum. size: bytes of the float32 array, whatever is sent.",
        "# time: median over n repeats, from the last rank's call to the last rank's return.",
        "# Contenders take turns, repeat by repeat, in the same processes; ratios are medians over pairs (above 1: faster than gloo).",
        "# Codecs apply from 64 KiB on: below, squinch6 is lossless too.",
        "# gloo-bf16 gets its input in bfloat16 already: conversion from and to float32 is not counted against it.",
        "# limit: 2(h-1)/h * size at the link's rate for h hosts, without headers.",
        "# algbw and busbw count float32 bytes and may exceed the link.",
        "# sent: bytes that left a rank's interface, headers and acknowledgements included; link%: how busy that keeps the link.",
        "# loopback: all ranks on one host, which they know. codec/flat: the algorithm that does not combine inside hosts first.",
        "# rms_err: against a float64 sum.",
        "# #wrong: 1 if errors exceed the codec's bound or ranks differ in any bit.",
    ]


def write_report(folder: Path, settings: dict[str, Any], made: list[Row], extras: dict[str, Any]) -> Path:
    """Writes `links-DATE.md`, raw times in a JSON file beside it. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.fromisoformat(settings["date"]).strftime("%Y-%m-%d-%H%M")
    report, raw = folder / f"links-{stamp}.md", folder / f"links-{stamp}.json"
    write_json(raw, settings, made, extras)
    text = [
        f"# All-reduce on links, {settings['date']}",
        "",
        f"Command: `{settings['command']}`. Raw times: [{raw.name}]({raw.name}).",
    ]
    text += ["", "```", *header(settings), COLUMNS, *map(line, made), *footer(made, extras), "```", ""]
    report.write_text("\n".join(text))
    return report


def write_json(path: Path, settings: dict[str, Any], made: list[Row], extras: dict[str, Any]) -> None:
    """Everything measured."""
    path.write_text(json.dumps({"settings": settings, "rows": [asdict(row) for row in made], "extras": extras}) + "\n")


def footer(made: list[Row], extras: dict[str, Any]) -> list[str]:
    """What else was measured, and the verdict."""
    lines = [f"# {text}" for text in extras.get("text", [])]
    wrong = sum(not row.ok for row in made)
    return [*lines, f"# {len(made)} rows, {wrong} wrong: {'FAILED' if wrong else 'OK'}"]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"
