"""The Squinch format in plain NumPy: the definition that the compiled kernels match bit for bit."""

from __future__ import annotations

import math

import numpy as np

from squinchcomm.kernels.squinch6 import exponent_for
from squinchcomm.kernels.squinch6_tables import (
    BLOCK_VALUES,
    CODE_INF,
    CODE_NAN,
    NEAREST,
    Q_NONFINITE,
    TILE_BLOCKS,
    TILE_BYTES,
    TILE_VALUES,
    TRAILER_BYTES,
    D,
    M,
    R,
)


def encode(values: np.ndarray, seed: int | None = None) -> np.ndarray:
    """float32 values to bytes; stochastic rounding if there is a seed."""
    exponent = exponent_for(_largest_magnitude(_tiles(values)))
    tiles = _tiles(_rescaled(values, -exponent))
    bits = tiles.view(np.uint32)
    magnitudes = np.abs(tiles)
    q = block_scales(magnitudes)
    with np.errstate(invalid="ignore", over="ignore"):
        u = magnitudes * R[q][:, None, :]
    finite = np.isfinite(tiles)
    u = np.where((q != Q_NONFINITE)[:, None, :], u, np.float32(0))
    codes = nearest_codes(u) if seed is None else stochastic_codes(u, random_bits(len(tiles), seed))
    codes[~finite] = np.where(np.isnan(tiles[~finite]), CODE_NAN, CODE_INF)
    shifts = np.arange(BLOCK_VALUES, dtype=np.uint32)[None, :, None]
    words = np.bitwise_or.reduce(codes.astype(np.uint32) << (4 * shifts), axis=1)
    signs = np.bitwise_or.reduce((bits >> 31) << shifts, axis=1)
    parts = [q.astype(np.uint8), signs.astype(np.uint8), words.astype("<u4").view(np.uint8)]
    trailer = np.frombuffer(np.array([exponent, 0], "<i4").tobytes(), np.uint8)
    return np.concatenate([np.concatenate(parts, axis=1).reshape(-1), trailer])


def decode(encoded: np.ndarray, count: int) -> np.ndarray:
    """Bytes to float32 values."""
    exponent = int(encoded[-TRAILER_BYTES:].view("<i4")[0])
    tiles = encoded[:-TRAILER_BYTES].reshape(-1, TILE_BYTES)
    q, signs = tiles[:, None, :TILE_BLOCKS], tiles[:, None, TILE_BLOCKS : 2 * TILE_BLOCKS].astype(np.uint32)
    words = np.ascontiguousarray(tiles[:, 2 * TILE_BLOCKS :]).view("<u4")[:, None, :]
    shifts = np.arange(BLOCK_VALUES, dtype=np.uint32)[None, :, None]
    codes = (words >> (4 * shifts)) & 15
    magnitudes = (codes * codes).astype(np.float32) * D[q]
    special = np.where(codes == CODE_NAN, np.float32(np.nan), np.where(codes == CODE_INF, np.float32(np.inf), np.float32(0)))
    magnitudes = np.where(q == Q_NONFINITE, special, magnitudes)
    values = (magnitudes.view(np.uint32) | (((signs >> shifts) & 1) << 31)).view(np.float32)
    return _rescaled(values.reshape(-1)[:count], exponent)


def block_scales(magnitudes: np.ndarray) -> np.ndarray:
    """The q of each block of (tiles, 8, 64) magnitudes."""
    largest = magnitudes.max(axis=1)  # NaN if one is
    q = np.searchsorted(M[1:255], largest.reshape(-1)).reshape(largest.shape) + 1
    return np.where(~np.isfinite(largest), Q_NONFINITE, np.where(largest == 0, 0, q))


def nearest_codes(u: np.ndarray) -> np.ndarray:
    """How many thresholds lie at or below each u."""
    return np.searchsorted(NEAREST, u.reshape(-1), side="right").reshape(u.shape)


def stochastic_codes(u: np.ndarray, random: np.ndarray) -> np.ndarray:
    """The code is k = floor(sqrt(u)), or k + 1 with probability (u - k*k) / (2k + 1)."""
    squares = (np.arange(1, 16) ** 2).astype(np.float32)
    k = np.searchsorted(squares, u.reshape(-1), side="right").reshape(u.shape)
    chance = (random.astype(np.float32) + np.float32(0.5)) / np.float32(65536)
    width, above = (2 * k + 1).astype(np.float32), u - (k * k).astype(np.float32)
    return np.minimum(k + (chance * width < above), 15)


def random_bits(tiles: int, seed: int) -> np.ndarray:
    """16 bits for each value of (tiles, 8, 64): value b of a block gets half b % 2 of word b // 2 (low half first)."""
    blocks = np.arange(tiles * TILE_BLOCKS, dtype=np.uint64)
    words = philox(blocks, seed).reshape(4, tiles, TILE_BLOCKS)
    halves = [(words[b // 2] >> (16 * (b % 2))) & 0xFFFF for b in range(BLOCK_VALUES)]
    return np.stack(halves, axis=1)


def philox(counter: np.ndarray, seed: int) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011): four 32-bit words a counter."""
    low32 = np.uint64(0xFFFFFFFF)
    c = [counter & low32, counter >> np.uint64(32), np.zeros_like(counter), np.zeros_like(counter)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ np.uint64(key[0]),
            second & low32,
            (first >> np.uint64(32)) ^ c[3] ^ np.uint64(key[1]),
            first & low32,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c).astype(np.uint32)


def _tiles(values: np.ndarray) -> np.ndarray:
    """(tiles, 8 values, 64 blocks), padded with zeros."""
    padded = np.zeros(-(-values.size // TILE_VALUES) * TILE_VALUES, np.float32)
    padded[: values.size] = values
    return padded.reshape(-1, BLOCK_VALUES, TILE_BLOCKS)


def _largest_magnitude(tiles: np.ndarray) -> int:
    """Bits of the largest magnitude among blocks that are finite throughout."""
    largest = np.abs(tiles).max(axis=1)
    finite = largest[np.isfinite(largest)]
    return int(finite.max().view(np.uint32)) if finite.size else 0


def _rescaled(values: np.ndarray, exponent: int) -> np.ndarray:
    """Returns values * 2**exponent, rounded once; finite values stay finite."""
    if exponent == 0:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (values.astype(np.float64) * math.ldexp(1.0, exponent)).astype(np.float32)
    overflowed = np.isinf(scaled) & np.isfinite(values)
    return np.where(overflowed, np.copysign(np.finfo(np.float32).max, values), scaled)
