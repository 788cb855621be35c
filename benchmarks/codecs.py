"""Every codec and operation beside a plain copy of the same float32 array, on one core.

    python benchmarks/codecs.py                          # 1 MiB (in the caches) and 64 MiB (in memory), about a minute
    python benchmarks/codecs.py --codecs squinch6 --sizes 1M -J codecs.json

The copy and all operations of a codec run in turn in every round; a ratio is the copy's time over the operation's time in the
same round, so that a slow moment of the machine hits both. 1.0 is as fast as `np.copyto`; speeds count the bytes of float32.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np

from squinchcomm.kernels import Codec, codec_names, get_codec, warm_up

KIB, MIB = 1024, 1024 * 1024
REDUCED = 4  # inputs of the reductions: one plain, the others encoded


@dataclass(frozen=True)
class Row:
    """One operation at one size; quartiles over the rounds."""

    codec: str
    operation: str
    nbytes: int
    rounds: int
    microseconds: float
    gigabytes_per_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    ratio_best: float


def size(text: str) -> int:
    """Bytes from "64M" or "256K"."""
    unit = {"K": KIB, "M": MIB}.get(text[-1].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def operations(codec: Codec, values: np.ndarray, other: np.ndarray) -> dict[str, Callable[[], Any]]:
    """What to time, on buffers made beforehand."""
    count = values.size
    encoded = codec.encode(values, seed=1)
    out = np.empty_like(encoded)
    inputs = [values, *[encoded] * (REDUCED - 1)]
    residual = np.zeros(count, np.float32)
    return {
        "encode": lambda: codec.encode(values, out, seed=1),
        "encode scale": lambda: codec.encode(values, out, scale=0.25, seed=1),
        "encode residual": lambda: codec.encode(values, out, residual=residual, seed=1),
        "decode": lambda: codec.decode(encoded, count, other),
        "decode_add": lambda: codec.decode_add(encoded, other),
        f"reduce {REDUCED}": lambda: codec.reduce(inputs, other),
        f"reduce_encode {REDUCED}": lambda: codec.reduce_encode(inputs, count, out, scale=1 / REDUCED, seed=1),
    }


def measure(name: str, nbytes: int, budget_s: float) -> list[Row]:
    """Rounds of the copy and a codec's operations until the time is used up, five at least."""
    values = np.random.default_rng(0).standard_normal(nbytes // 4, dtype=np.float32)
    other = np.zeros_like(values)
    # The copy overwrites what the sums leave.
    contenders = {"copy": lambda: np.copyto(other, values), **operations(get_codec(name), values, other)}
    times: dict[str, list[float]] = {key: [] for key in contenders}
    for call in contenders.values():
        call()
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(times["copy"]) < 5:
        for key, call in contenders.items():
            start = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - start)
    return [_row((name, key), nbytes, times[key], times["copy"]) for key in contenders]


def _row(key: tuple[str, str], nbytes: int, seconds: list[float], copy: list[float]) -> Row:
    low, ratio, high = quantiles([c / s for c, s in zip(copy, seconds, strict=True)])
    middle = quantiles(seconds)[1]
    return Row(*key, nbytes, len(seconds), middle * 1e6, nbytes / middle / 1e9, ratio, low, high, min(copy) / min(seconds))


def machine() -> dict[str, str]:
    """What the figures depend on."""
    import numba

    model = platform.processor()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        flags = next(line for line in cpu_info.read_text().splitlines() if line.startswith("model name"))
        model = flags.split(":")[1].strip()
    return {
        "cpu": f"{model}, {os.cpu_count()} cores, one used",
        "load": "{:.1f} {:.1f} {:.1f} before the run".format(*os.getloadavg()),
        "versions": f"Python {platform.python_version()}, NumPy {np.__version__}, Numba {numba.__version__}",
        "command": "python " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
    }


def report(facts: dict[str, str], rows: list[Row]) -> str:
    """A table whose header lines begin with #."""
    lines = [f"# {name}: {value}" for name, value in facts.items()]
    lines.append("# ratio: copy time / operation time in the same round; median and quartiles; best: of the fastest rounds")
    lines.append("# GB/s and us: median; bytes of float32 elements")
    lines.append(
        f"# {'codec':<12} {'operation':<18} {'bytes':>9} {'rounds':>6} {'us':>9} {'GB/s':>6} {'ratio':>6} {'quartiles':>13} {'best':>6}"
    )
    for row in rows:
        lines.append(
            f"  {row.codec:<12} {row.operation:<18} {row.nbytes:>9} {row.rounds:>6} {row.microseconds:>9.1f} "
            f"{row.gigabytes_per_s:>6.1f} {row.ratio:>6.2f} {row.ratio_low:>6.2f}-{row.ratio_high:<6.2f} {row.ratio_best:>6.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Codecs beside a plain copy, on one core.")
    parser.add_argument("--codecs", nargs="+", default=None, metavar="NAME", help="default: all")
    parser.add_argument("--sizes", nargs="+", type=size, default=[MIB, 64 * MIB], help="bytes of float32, with K or M")
    parser.add_argument("--budget", type=float, default=25.0, help="seconds of rounds for each size")
    parser.add_argument("-J", "--json", type=Path, default=None, help="write the rows there")
    options = parser.parse_args()
    warm_up()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    facts = machine()
    names = options.codecs or list(codec_names())
    rows = [row for nbytes in options.sizes for name in names for row in measure(name, nbytes, options.budget / len(names))]
    print(report(facts, rows))
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
