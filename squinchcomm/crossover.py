"""Where compressing starts to pay, for the codec "auto": by the cost model, from constants that all ranks share."""

from __future__ import annotations

from collections.abc import Sequence

from squinchcomm.cost import Layout, choose
from squinchcomm.machine import CodecCost, Machine, codec_cost

# Exact sums win unless encoding saves more than this part of the time: against measured times the model overrates what is saved on
# arrays of some 100 KiB, where most of the time is overhead, and no sum should be inexact for next to nothing.
LEAST_GAIN = 0.15
_MAX_KNOWN = 4096
_LARGEST_BYTES = 1 << 40


class Crossover:
    """Whether all-reduces of one group are quicker encoded. A pure function of what it is made from: equal on all ranks if that is.

    Attributes:
        layout: Ranks and hosts.
        machine: Constants of a host and its link.
        encoded: What encoding costs.
    """

    def __init__(self, hosts: Sequence[str], machine: Machine, encoded: CodecCost, algorithm: str = "auto") -> None:
        self.layout = Layout.of(hosts)
        self.machine = machine
        self.encoded = encoded
        self.algorithm = algorithm
        self._exact = codec_cost("none")
        self._known: dict[tuple[int, int], bool] = {}

    def __repr__(self) -> str:
        least = self.least_bytes()
        return f"<Crossover: {self.encoded.name} {'never' if least is None else f'from {least} bytes on'}, {self.layout}>"

    def of(self, hosts: Sequence[str]) -> Crossover:
        """That of another group on the same machines."""
        return Crossover(hosts, self.machine, self.encoded, self.algorithm)

    def pays(self, nbytes: int, itemsize: int = 4) -> bool:
        """Whether an all-reduce of `nbytes` bytes takes less time encoded than as it is, by more than the model is uncertain.

        Also asked for reduce-scatter and all-gather, which are a half of an all-reduce each and cross over at about the same size.
        """
        key = nbytes, itemsize
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            encoded_s, exact_s = (self._time_s(nbytes, itemsize, codec) for codec in (self.encoded, self._exact))
            known = self._known[key] = encoded_s < (1 - LEAST_GAIN) * exact_s
        return known

    def least_bytes(self) -> int | None:
        """The smallest power of two from which float32 arrays are encoded, for messages; None if none is."""
        size = 1024
        while size <= _LARGEST_BYTES and not self.pays(size):
            size *= 2
        return size if size <= _LARGEST_BYTES else None

    def _time_s(self, nbytes: int, itemsize: int, codec: CodecCost) -> float:
        """Of the algorithm that the communicator takes for an array of floats."""
        half = itemsize == 2
        return choose(self.layout, nbytes, codec, self.machine, itemsize=itemsize, half=half, setting=self.algorithm).time_s
