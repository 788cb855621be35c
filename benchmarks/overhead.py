"""What metrics and the flight recorder cost: loops of small steps with both on and both off, taking turns in one run.

    python benchmarks/overhead.py                  # 2 ranks, about a minute
    python benchmarks/overhead.py --compute 0      # the calls alone, as small as they get

Each rank is a process. A step computes for a while (by default about 5 ms, a small one) and makes a compressed all-reduce of 256 KiB
and a lossless one of 4 KiB. Ranks have two communicators of the same kind, one with the recorder and one without. Blocks of steps
with one and the other take turns in an order that alternates; with the recorder, every block also scrapes the rank's metrics, far more
often than every 15 s. The result is the median over pairs of blocks, in time that passed and in processor time, which depends less on
what else the machine does. Counting as such cannot be switched off, so it is in both: about a microsecond a call.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import sys
import time
import urllib.request
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

import squinchcomm
from squinchcomm import metrics
from squinchcomm.communicator import Communicator
from squinchcomm.kernels import warm_up

SMALL, LARGE = 1 << 10, 1 << 16  # float32 elements
_OFF, _ON = "off", "on"


def rank_main(rank: int, options: argparse.Namespace, address: str, results: Any) -> None:
    """One rank: sends (which, seconds a step) of each block to `results`."""
    groups = {
        _OFF: squinchcomm.init(rank, options.ranks, f"{address}-off", codec="squinch6", recorder=0),
        _ON: squinchcomm.init(rank, options.ranks, f"{address}-on", codec="squinch6", recorder=options.recorder),
    }
    port = metrics.serve(0)
    work = np.random.default_rng(rank).standard_normal((192, 192), dtype=np.float32)
    arrays = [np.ones(SMALL, np.float32)] + ([] if options.small_only else [np.ones(LARGE, np.float32)])
    repeats = matmuls(work, options.compute / 1e3)
    for block in range(options.blocks):
        for which in (_OFF, _ON) if block % 2 else (_ON, _OFF):
            took = steps(groups[which], arrays, work, repeats, options.steps)
            if which == _ON:
                scrape(port)
            if block >= options.warm_up:
                results.put((rank, which, took))
    for group in groups.values():
        group.close()
    metrics.stop()
    results.put((rank, "end", None))


def matmuls(work: np.ndarray, seconds: float) -> int:
    """How many multiplications take that long."""
    took = []
    for _ in range(50):
        start = time.perf_counter()
        work @ work
        took.append(time.perf_counter() - start)
    return round(seconds / min(took))


def steps(comm: Communicator, arrays: list[np.ndarray], work: np.ndarray, repeats: int, count: int) -> tuple[float, float]:
    """Seconds a step: passed, and of processor time."""
    comm.barrier()
    start, processor = time.perf_counter(), time.process_time()
    for _ in range(count):
        for _ in range(repeats):
            work @ work
        for array in arrays:
            comm.allreduce(array, "avg")
    return (time.perf_counter() - start) / count, (time.process_time() - processor) / count


def scrape(port: int | None) -> None:
    """Reads this process's exporter, as Prometheus does."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        answer.read()


def measure(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Seconds a step of each block, passed and of processor time, of the slowest rank."""
    warm_up()
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # for the ranks: threads that spin would be measured
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    address = f"ipc://@squinchcomm-overhead-{secrets.token_hex(6)}"
    ranks = [
        context.Process(target=rank_main, args=(rank, options, address, results), daemon=True) for rank in range(options.ranks)
    ]
    for process in ranks:
        process.start()
    times: dict[str, dict[int, list[tuple[float, float]]]] = {which: {} for which in (_OFF, _ON)}
    left = options.ranks
    while left:
        rank, what, found = results.get(timeout=600)
        if what == "end":
            left -= 1
        else:
            times[what].setdefault(rank, []).append(found)
    for process in ranks:
        process.join(20)
    return {
        which: [
            (max(passed), max(processor))
            for passed, processor in (zip(*block, strict=True) for block in zip(*of.values(), strict=True))
        ]
        for which, of in times.items()
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Step time with metrics and recorder on against off.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=40, help="pairs of blocks, with and without")
    parser.add_argument("--steps", type=int, default=30, help="steps a block")
    parser.add_argument("--warm-up", type=int, default=4, help="pairs of blocks left out at the beginning")
    parser.add_argument("--compute", type=float, default=5.0, help="milliseconds of computing a step")
    parser.add_argument("--small-only", action="store_true", help="leave out the compressed all-reduce")
    parser.add_argument("--recorder", type=int, default=1000, help="calls that the recorder keeps")
    parser.add_argument("-J", "--json", type=Path, metavar="FILE", help="write all times there")
    options = parser.parse_args()
    times = measure(options)
    pairs = options.blocks - options.warm_up
    print(f"# {options.ranks} ranks, {pairs} pairs of {options.steps} steps, about {options.compute:g} ms of computing each")
    for place, kind in enumerate(("passed", "processor")):
        off, on = ([block[place] for block in times[which]] for which in (_OFF, _ON))
        ratios = [b / a - 1 for a, b in zip(off, on, strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        extra_us = median(b - a for a, b in zip(off, on, strict=True)) * 1e6
        print(
            f"# {kind} time of a step, median: off {median(off) * 1e3:.4g} ms, on {median(on) * 1e3:.4g} ms, {extra_us:+.1f} us"
        )
        print(f"overhead, {kind} time: {middle:+.2%} (quartiles {low:+.2%}, {high:+.2%})")
    if options.json:
        options.json.write_text(json.dumps(times, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
