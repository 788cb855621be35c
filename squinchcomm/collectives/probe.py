"""What encoding does to numbers, looked at in a small part of one chunk once in a while, so that it costs nothing that shows."""

from __future__ import annotations

import math

import numpy as np

from squinchcomm.kernels.codec import Codec
from squinchcomm.kernels.dtypes import to_float32
from squinchcomm.kernels.squinch6 import Squinch6
from squinchcomm.kernels.squinch6_tables import TILE_BLOCKS, TILE_BYTES, TILE_VALUES, TRAILER_BYTES
from squinchcomm.stats import Stats

PROBE_PERIOD = 50  # compressed calls of a communicator for one that is looked at

_MAX_TILES = 256  # of which scales are read: 16 KiB
_Q_SMALLEST, _Q_LARGEST = 1, 254


class Probe:
    """Looks at one encoded chunk and notes in `stats` what it finds. `turn` chooses the part of the chunk."""

    def __init__(self, codec: Codec, stats: Stats, turn: int) -> None:
        self._codec = codec
        self._stats = stats
        self._turn = turn

    def look(self, values: np.ndarray, payload: np.ndarray) -> None:
        """Compares `values`, 1-D, with what `payload` decodes to: a tile of 512 of them for Squinch, all for other codecs."""
        tiles = values.size // TILE_VALUES
        if isinstance(self._codec, Squinch6) and tiles:
            self._count_blocks(payload, tiles)
            tile = self._turn % tiles
            values = values[tile * TILE_VALUES : (tile + 1) * TILE_VALUES]
            part = payload[tile * TILE_BYTES : (tile + 1) * TILE_BYTES]
            payload = np.concatenate([part, payload[-TRAILER_BYTES:]])
        self._note_error(to_float32(values), self._codec.decode(payload, values.size))

    def _note_error(self, exact: np.ndarray, decoded: np.ndarray) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            scale = np.max(np.abs(exact), initial=0.0)
            if not 0 < scale < math.inf:
                return  # zeros have no relative error, and what is not finite is counted elsewhere
            wanted = exact.astype(np.float64) / scale
            lost = decoded.astype(np.float64) / scale - wanted
            ratio = math.sqrt(float(lost @ lost) / float(wanted @ wanted))
            self._stats.error_ratios[self._codec.name] = self._stats.error_ratio = ratio

    def _count_blocks(self, payload: np.ndarray, tiles: int) -> None:
        """Reads the scales of some tiles: one byte a block, at the beginning of its tile."""
        used = min(tiles, _MAX_TILES)
        first = self._turn * _MAX_TILES % (tiles - used + 1)
        rows = payload[first * TILE_BYTES : (first + used) * TILE_BYTES].reshape(used, TILE_BYTES)
        scales = rows[:, :TILE_BLOCKS]
        self._stats.sampled_blocks += scales.size
        self._stats.saturated_blocks += int(np.count_nonzero(scales == _Q_LARGEST))
        self._stats.underflow_blocks += int(np.count_nonzero(scales == _Q_SMALLEST))
