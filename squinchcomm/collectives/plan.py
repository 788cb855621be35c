"""How an array is cut: one shard a rank, each shard into chunks that flow through the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

# Raw bytes of a chunk: large enough that the cost of a frame does not show, small enough that a chunk stays in cache and that
# the first and the last one, during which the link idles, do not show either. Two chunks in a shard overlap nearly as well as
# more, and cost less: half the time of four for 1 MiB among 4 ranks on 2 cores, no more for larger arrays, on any link.
MIN_CHUNK_BYTES = 256 << 10
MAX_CHUNK_BYTES = 3 << 19  # 1.5 MiB
MAX_ENCODED_CHUNK_BYTES = 4 << 20  # before encoding
CHUNKS_PER_SHARD = 2


class Plan:
    """Shards and chunks of an array, the same on all ranks. A chunk has `chunk_bytes`, or what suits the shards, `most` at most.

    Attributes:
        bounds: One offset more than shards; shard r is `bounds[r]:bounds[r + 1]`.
        chunk: Elements in a chunk, the last of a shard excepted; a multiple of `tile`.
    """

    __slots__ = ("bounds", "chunk")

    def __init__(self, bounds: Sequence[int], itemsize: int, tile: int, chunk_bytes: int = 0, most: int = 0) -> None:
        self.bounds = bounds
        if not chunk_bytes:
            largest = max(stop - start for start, stop in pairwise(bounds)) * itemsize
            most = most or (MAX_CHUNK_BYTES if tile == 1 else MAX_ENCODED_CHUNK_BYTES)
            chunk_bytes = min(max(largest // CHUNKS_PER_SHARD, MIN_CHUNK_BYTES), most)
        self.chunk = max(1, round(chunk_bytes / itemsize / tile)) * tile

    @classmethod
    def even(cls, count: int, shards: int, itemsize: int, tile: int, chunk_bytes: int = 0, most: int = 0) -> Plan:
        """Shards of nearly equal size whose boundaries are multiples of `tile`, so that no tile is split."""
        tiles = -(-count // tile)
        cuts = [min(count, tiles * shard // shards * tile) for shard in range(shards)]
        return cls([*cuts, count], itemsize, tile, chunk_bytes, most)

    @classmethod
    def uneven(cls, counts: Sequence[int], itemsize: int, tile: int, chunk_bytes: int = 0, most: int = 0) -> Plan:
        """Shards of the given sizes."""
        return cls([0, *accumulate(counts)], itemsize, tile, chunk_bytes, most)

    def chunks(self, shard: int) -> int:
        """Number of chunks in a shard; 0 if it is empty."""
        return -(-(self.bounds[shard + 1] - self.bounds[shard]) // self.chunk)

    def span(self, shard: int, chunk: int) -> tuple[int, int]:
        """First element of a chunk, and the one after its last."""
        start = self.bounds[shard] + chunk * self.chunk
        return start, min(start + self.chunk, self.bounds[shard + 1])
