"""One rank of the measurement behind the constants of `simulate_check.py`: nothing that `exchange` runs is an all-reduce.

It obeys commands as the ranks of the link benchmark do, and knows theirs, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import links_rank
import numpy as np


class Rank(links_rank.Rank):
    """State of one rank between commands."""

    def exchange(self, *, kind: str, part_bytes: int, repeats: int) -> dict[str, Any]:
        """Moments and seconds of `repeats` exchanges, each after a barrier, and the median processor time of this process.

        Args:
            kind: "move" sends `part_bytes` to every other rank and gets as many; "reduce" is a reduce-scatter with squinch6 in which
                every rank sums a shard of `part_bytes` of float32.
            part_bytes: Of a part or shard.
            repeats: After two that do not count.
        """
        call = {"move": self._moving, "reduce": self._reducing}[kind](part_bytes)
        starts, times, processor = [], [], []
        for repeat in range(-2, repeats):
            self.comm.barrier()
            before, start = time.process_time(), time.perf_counter()
            call()
            if repeat >= 0:
                times.append(time.perf_counter() - start)
                processor.append(time.process_time() - before)
                starts.append(start)
        return {"starts": starts, "times": times, "processor_s": statistics.median(processor)}

    def _moving(self, part_bytes: int) -> Callable[[], None]:
        parts = [0 if rank == self.rank else part_bytes for rank in range(self.world_size)]
        source, target = np.ones(sum(parts), np.uint8), np.empty(sum(parts), np.uint8)
        return lambda: self.comm.all_to_all(target, source, output_counts=parts, input_counts=parts)

    def _reducing(self, part_bytes: int) -> Callable[[], None]:
        whole = links_rank.drawn(self.rank, 0, self.world_size * part_bytes // 4)
        shard = np.empty(part_bytes // 4, np.float32)
        return lambda: self.comm.reduce_scatter(shard, whole, codec="squinch6")


if __name__ == "__main__":
    links_rank.obey(Rank)
