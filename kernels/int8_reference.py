"""The int8 format in plain NumPy: the definition that the compiled kernels match bit for bit."""

from __future__ import annotations

import numpy as np

from squinchcomm.kernels.int8 import BLOCK_VALUES, LARGEST_SCALE, SMALLEST_MAXIMUM


def encode(values: np.ndarray) -> np.ndarray:
    """float32 values to bytes: all scales, then all codes."""
    blocks = _blocks(values)
    largest = np.abs(blocks).max(axis=1)  # NaN if one is
    usable = largest >= SMALLEST_MAXIMUM
    with np.errstate(all="ignore"):
        scales = np.where(usable, np.minimum(largest / np.float32(127), np.float32(LARGEST_SCALE)), np.float32(0))
        inverse = np.where(usable & np.isfinite(largest), np.float32(127) / largest, np.float32(0))
        codes = np.rint(blocks * inverse[:, None])
    finite = np.isfinite(largest)
    scales[~finite] = np.nan
    codes[~finite] = 0
    return np.concatenate([scales.view(np.uint8), codes.reshape(-1)[: values.size].astype(np.int8).view(np.uint8)])


def decode(encoded: np.ndarray, count: int) -> np.ndarray:
    """Bytes to float32 values."""
    n_blocks = -(-count // BLOCK_VALUES)
    scales = np.ascontiguousarray(encoded[: 4 * n_blocks]).view("<f4")
    codes = _blocks(encoded[4 * n_blocks :].view(np.int8).astype(np.float32))
    with np.errstate(all="ignore"):
        values: np.ndarray = codes * scales[:, None]
    return values.reshape(-1)[:count]


def _blocks(values: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-values.size // BLOCK_VALUES) * BLOCK_VALUES, np.float32)
    padded[: values.size] = values
    return padded.reshape(-1, BLOCK_VALUES)
