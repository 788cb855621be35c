"""Time of small lossless all_reduces through torch.distributed: squinch beside gloo, in the same processes, taking turns.

    python benchmarks/torch_latency.py --ranks 2 --bytes 1024

Each round makes `--calls` calls over one backend, then as many over the other; a round's figure is the mean time of a call on its
slowest rank. Prints the median over the rounds, and with `--json` everything.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import os
import pstats
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import squinchcomm.torch

BACKENDS = ("squinch", "gloo")


def measure(rank: int, options: argparse.Namespace, meeting: str) -> None:
    """What one rank does; rank 0 prints."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.ranks, timeout=patience)
    groups = {
        "gloo": dist.group.WORLD,
        "squinch": dist.new_group(backend="squinch", pg_options=squinchcomm.torch.Options(compress="off")),
    }
    tensor = torch.zeros(options.bytes // 4)
    times: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for number in range(options.rounds + 1):
        for name in BACKENDS:
            seconds = one_round(tensor, groups[name], options.calls)
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number:  # the first one warms up
                times[name].append(slowest.item() / options.calls * 1e6)
    if options.profile and rank == 0:
        profile = cProfile.Profile()
        profile.runcall(one_round, tensor, groups["squinch"], options.calls)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    elif options.profile:
        one_round(tensor, groups["squinch"], options.calls)
    if rank == 0:
        show(options, times)
    dist.barrier()
    dist.destroy_process_group()


def one_round(tensor: torch.Tensor, group: dist.ProcessGroup | None, calls: int) -> float:
    """Seconds of `calls` all_reduces, all ranks starting together."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    return time.perf_counter() - started


def show(options: argparse.Namespace, times: dict[str, list[float]]) -> None:
    """Prints medians and ratio; writes the JSON file if asked to."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = statistics.median(ours / gloo for ours, gloo in zip(times["squinch"], times["gloo"], strict=True))
    for name, median in medians.items():
        print(f"{name:8} {median:8.1f} us a call ({min(times[name]):.1f} to {max(times[name]):.1f})")
    print(f"squinch takes {ratio:.2f} times gloo's time: {options.bytes} bytes, {options.ranks} ranks, {options.rounds} rounds")
    if options.json:
        machine = {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__, "python": sys.version.split()[0]}
        record = {"arguments": vars(options) | {"json": str(options.json)}, "machine": machine, "us": times, "ratio": ratio}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=1024, help="size of the float32 tensor")
    parser.add_argument("--calls", type=int, default=200, help="calls in a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="print where rank 0 spends a round over squinch")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=measure, args=(rank, options, f"{folder}/store")) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        sys.exit("a rank failed; its error is above")


if __name__ == "__main__":
    main()
