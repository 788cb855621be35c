"""One rank of `simulate_check.py`: the commands of the link benchmark, and exchanges that are not all-reduces.

Its times count from the mean of the ranks' calls. Where ranks outnumber processors they leave a barrier one by one, up to a third of an
all-reduce apart: the first to call have done a part of their work when the last one does, and have waited for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import links_rank
import numpy as np

_BURST_S = 0.002  # a burst of 16 KB at 0.1 Gb/s takes 1.3 ms, one of 125 KB at 1 Gb/s a millisecond
_WARMING_CALLS = 3


class Rank(links_rank.Rank):
    """State of one rank between commands."""

    def measure(self, *, contenders: list[str], repeats: int, check: bool) -> dict[str, Any]:
        """As in the link benchmark, from the mean of the ranks' calls."""
        answer = super().measure(contenders=contenders, repeats=repeats, check=check)
        starts, times = answer["starts"], answer["times"]
        for name in contenders:
            starts[name], times[name] = self._from_mean_call(starts[name], times[name])
        return answer

    def _barrier(self) -> None:
        """After a pause in which shaped links regain their bursts, which the model takes to be there, and calls that warm up again."""
        time.sleep(_BURST_S)
        for _ in range(_WARMING_CALLS):
            self.comm.barrier()

    def _sent_bytes(self) -> int:
        """Nothing is read between barrier and call: it would set the ranks further apart."""
        return 0

    def exchange(self, *, kind: str, part_bytes: int, repeats: int) -> dict[str, Any]:
        """Seconds of `repeats` exchanges, each after a barrier, and the median processor time of this process.

        Args:
            kind: "move" sends `part_bytes` to every other rank and gets as many; "sum" is a lossless reduce-scatter in which every
                rank sums a shard of `part_bytes` of float32, "reduce" is one with squinch6.
            part_bytes: Of a part or shard.
            repeats: After two that do not count.
        """
        codec = {"move": None, "sum": "none", "reduce": "squinch6"}[kind]
        call = self._moving(part_bytes) if codec is None else self._summing(part_bytes, codec)
        starts, times, processor = [], [], []
        for repeat in range(-2, repeats):
            self._barrier()
            before, start = time.process_time(), time.perf_counter()
            call()
            if repeat >= 0:
                times.append(time.perf_counter() - start)
                processor.append(time.process_time() - before)
                starts.append(start)
        return {"times": self._from_mean_call(starts, times)[1], "processor_s": statistics.median(processor)}

    def _from_mean_call(self, starts: list[float], times: list[float]) -> tuple[list[float], list[float]]:
        """The mean moments at which all ranks called, and the seconds from there to this rank's returns."""
        own = np.array(starts)
        everybody = np.empty((self.world_size, own.size))
        self.comm.all_gather(everybody, own)
        mean = everybody.mean(axis=0)
        return mean.tolist(), (own + times - mean).tolist()

    def _moving(self, part_bytes: int) -> Callable[[], None]:
        parts = [0 if rank == self.rank else part_bytes for rank in range(self.world_size)]
        source, target = np.ones(sum(parts), np.uint8), np.empty(sum(parts), np.uint8)
        return lambda: self.comm.all_to_all(target, source, output_counts=parts, input_counts=parts)

    def _summing(self, part_bytes: int, codec: str) -> Callable[[], None]:
        whole = links_rank.drawn(self.rank, 0, self.world_size * part_bytes // 4)
        shard = np.empty(part_bytes // 4, np.float32)
        return lambda: self.comm.reduce_scatter(shard, whole, codec=codec)


if __name__ == "__main__":
    links_rank.obey(Rank)
