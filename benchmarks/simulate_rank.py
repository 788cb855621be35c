"""One rank of the measurement behind the constants of `simulate_check.py`: nothing that it runs is an all-reduce.

    python benchmarks/simulate_rank.py '{"rank": 0, ...}'

Every rank sends every other one as many bytes, empty frames first, then large ones. Prints what that took as one JSON line.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import numpy as np

import squinchcomm


def exchange(comm: squinchcomm.Communicator, part_bytes: int, repeats: int) -> dict[str, float]:
    """Seconds of an all_to_all of `part_bytes` to each other rank, and of this process's processor time in one."""
    parts = [0 if rank == comm.rank else part_bytes for rank in range(comm.world_size)]
    source, target = np.ones(sum(parts), np.uint8), np.empty(sum(parts), np.uint8)
    times, processor = [], 0.0
    for repeat in range(-2, repeats):
        comm.barrier()
        before, start = time.process_time(), time.perf_counter()
        comm.all_to_all(target, source, output_counts=parts, input_counts=parts)
        if repeat >= 0:
            times.append(time.perf_counter() - start)
            processor += time.process_time() - before
    return {"time_s": statistics.median(times), "processor_s": processor / repeats}


def main() -> None:
    """Joins, measures, prints."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    plan: list[tuple[int, int]] = settings.pop("plan")
    with squinchcomm.init(security="none", **settings) as comm:
        print(json.dumps([exchange(comm, part_bytes, repeats) for part_bytes, repeats in plan]), flush=True)
        comm.barrier()
    os._exit(0)  # the numbers are out; nothing that is still open may keep the process


if __name__ == "__main__":
    main()
