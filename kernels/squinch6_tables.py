"""The scales of the Squinch format as tables, and where its codes change."""

from __future__ import annotations

import numpy as np

BLOCK_VALUES = 8
TILE_BLOCKS = 64
TILE_VALUES = BLOCK_VALUES * TILE_BLOCKS
TILE_BYTES = 384
TRAILER_BYTES = 8
Q_NONFINITE = 255
CODE_INF, CODE_NAN = 14, 15

# Without an exponent the format covers these magnitudes with its usual relative error.
PLAIN_MIN, PLAIN_MAX = 2.0**-16, 2.0**28
EXPONENT_MIN, EXPONENT_MAX = -149, 127


def _scales() -> np.ndarray:
    scales = np.exp((np.arange(256) - 128) / 6).astype(np.float32)
    scales[[0, 255]] = 0
    return scales


# M(q), the largest magnitude of a block; R(q) multiplies magnitudes into 0..225; D(q) turns squared codes into values.
# q = 0 (zeros) and q = 255 (not finite) have no scale: their entries are 0.
M = _scales()
R = np.divide(np.float32(225), M, out=np.zeros_like(M), where=M > 0)
D = M / np.float32(225)

# What the kernel looks up, behind one address: a row (M(q), R(q), R(q+1), D(q)) for each q, then D as a column, which is read
# 32 entries at a time and padded for that.
ROW_BYTES = 16
D_COLUMN = 256 * ROW_BYTES
TABLES = np.concatenate([np.stack([M, R, np.roll(R, -1), D], axis=1).reshape(-1), D, np.zeros(32, np.float32)])

_k = np.arange(15)
# A magnitude u = |x| * R(q) gets code k when NEAREST[k-1] <= u < NEAREST[k].
NEAREST = (_k * _k + _k + 0.375).astype(np.float32)
