"""Random data that any rank can make for any other, and the float64 oracle that results are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from squinchcomm.kernels.dtypes import BFLOAT16, canonical_dtype, from_float32, to_float32

REDUCTIONS = ("sum", "avg", "min", "max", "product")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
_CHUNK = 1 << 18  # elements that are made, and checked, at a time
_TILE = 512  # elements within which codecs share a scale

# Largest error of one encoding, as a fraction of the largest magnitude among the elements that may share its scale.
# Codes of squinch6 are squares of 0..15, in units of 1/225 of a scale that is at most exp(1/6) times the block's maximum.
_CODEC_BOUND = {
    "squinch6": 14.625 / 225 * exp(1 / 6),
    "squinch6-sr": 29 / 225 * exp(1 / 6),
    "bf16": 2.0**-8,
    "int8": 0.5 / 127 * 1.01,
}
_UNKNOWN_BOUND = 0.25


@dataclass(frozen=True)
class Segment:
    """Elements `start`, `start + 1`, ... of a result: element `source`, ... of one rank's input, or of all ranks' combined."""

    start: int
    count: int
    ranks: tuple[int, ...]
    source: int


@dataclass
class Verdict:
    """What a check found: elements out of bounds, the largest error and the largest expected magnitude."""

    wrong: int = 0
    error: float = 0.0
    magnitude: float = 0.0


@dataclass(frozen=True)
class Data:
    """The inputs of all ranks for one element type and reduction: an endless stream for each rank, a function of `seed`."""

    dtype: np.dtype
    reduction: str
    seed: int = 0

    def values(self, rank: int, start: int, count: int) -> np.ndarray:
        """Elements `start` to `start + count` of `rank`'s stream, in `dtype`."""
        first, last = start // _CHUNK, (start + count - 1) // _CHUNK
        pieces = []
        for chunk in range(first, last + 1):
            begin, end = max(0, start - chunk * _CHUNK), min(_CHUNK, start + count - chunk * _CHUNK)
            pieces.append(self._chunk(rank, chunk, end)[begin:])
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)

    def _chunk(self, rank: int, chunk: int, count: int) -> np.ndarray:
        random = np.random.Generator(np.random.Philox(key=(self.seed << 80) | (rank << 48) | chunk))
        if self.dtype.kind in "iu":
            low = 1 if self.reduction == "product" else 0 if self.dtype.kind == "u" else -8
            return random.integers(low, 3 if self.reduction == "product" else 8, count, dtype=self.dtype)
        if self.reduction == "product":
            plain = random.random(count, dtype=np.float32) + np.float32(0.5)
        else:
            plain = random.standard_normal(count, dtype=np.float32)
        return from_float32(plain, self.dtype)


def wide(array: np.ndarray) -> np.ndarray:
    """Exact float64 of floats, int64 of integers."""
    if canonical_dtype(array.dtype) == BFLOAT16:
        return to_float32(array).astype(np.float64)
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float64)


def check(data: Data, result: np.ndarray, segments: Sequence[Segment], codec: str | None, encodings: int) -> Verdict:
    """Compares `result` with the oracle.

    Args:
        data: Where the inputs came from.
        result: What the collective left, 1-D.
        segments: Which elements of it to check.
        codec: The lossy codec used; None means lossless.
        encodings: How often an element went through it: 1 for the contributions, 2 if the result did, too.
    """
    verdict = Verdict()
    with np.errstate(all="ignore"):
        for segment in segments:
            for offset in range(0, segment.count, _CHUNK):
                count = min(_CHUNK, segment.count - offset)
                got = wide(result[segment.start + offset : segment.start + offset + count])
                _check_part(verdict, data, got, segment.ranks, segment.source + offset, codec, encodings)
    return verdict


def _check_part(
    verdict: Verdict, data: Data, got: np.ndarray, ranks: tuple[int, ...], start: int, codec: str | None, encodings: int
) -> None:
    margin = min(start, _TILE) if codec else 0
    inputs = [wide(data.values(rank, start - margin, margin + got.size + (_TILE if codec else 0))) for rank in ranks]
    own = slice(margin, margin + got.size)
    want = _combine(inputs, data)
    if data.dtype.kind in "iu":
        error = np.abs(got - want[own])
        bound: np.ndarray | float = 0.0
    else:
        error = np.abs(got - want[own])
        error[np.isnan(error)] = np.inf
        bound = _rounding_bound(inputs, want, data)[own]
        if codec:
            bound = bound + _codec_bound(inputs, want, data, codec, encodings)[own]
    verdict.wrong += int(np.count_nonzero(error > bound))
    verdict.error = max(verdict.error, float(error.max(initial=0)))
    verdict.magnitude = max(verdict.magnitude, float(np.abs(want[own]).max(initial=0)))


def _combine(inputs: list[np.ndarray], data: Data) -> np.ndarray:
    ufunc = {"min": np.minimum, "max": np.maximum, "product": np.multiply}.get(data.reduction, np.add)
    total = inputs[0]
    for other in inputs[1:]:
        total = ufunc(total, other)
    if data.reduction == "avg" and len(inputs) > 1:
        return np.asarray(total / len(inputs))
    return wide(total.astype(data.dtype)) if data.dtype.kind in "iu" else total  # integers wrap around


def _rounding_bound(inputs: list[np.ndarray], want: np.ndarray, data: Data) -> np.ndarray:
    """What float32 (float64 for float64) accumulation and one rounding to the element type may lose."""
    if len(inputs) == 1 or data.reduction in ("min", "max"):
        return np.zeros(want.size)
    unit = np.finfo(np.float64 if data.dtype == np.float64 else np.float32).eps
    final = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(_name(data.dtype), 0.0)
    if data.reduction == "product":
        return np.asarray((len(inputs) * unit + final) * np.abs(want))
    share = 1.0 / len(inputs) if data.reduction == "avg" else 1.0
    bound = len(inputs) * unit * share * sum(np.abs(each) for each in inputs) + final * np.abs(want)
    return np.asarray(bound + (2.0**-25 if data.dtype == np.float16 else 0.0))


def _codec_bound(inputs: list[np.ndarray], want: np.ndarray, data: Data, codec: str, encodings: int) -> np.ndarray:
    factor = _CODEC_BOUND.get(codec, _UNKNOWN_BOUND)
    share = 1.0 / len(inputs) if data.reduction == "avg" else 1.0
    bound = factor * share * sum(_tile_maximum(each) for each in inputs)
    if encodings > 1:
        bound = bound + factor * (_tile_maximum(want) + bound)
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(_name(data.dtype), 0.0)
    return np.asarray(bound * (1 + rounding + 1e-6) + rounding * np.abs(want))


def _tile_maximum(values: np.ndarray) -> np.ndarray:
    """For each element, the largest magnitude within a tile's reach on both sides: where tiles begin is the library's affair."""
    tiles = -(-values.size // _TILE)
    padded = np.zeros((tiles + 2) * _TILE)
    padded[_TILE : _TILE + values.size] = np.abs(values)
    peaks = padded.reshape(-1, _TILE).max(axis=1)
    reach = np.maximum(np.maximum(peaks[:-2], peaks[1:-1]), peaks[2:])
    return np.repeat(reach, _TILE)[: values.size]


def _name(dtype: np.dtype) -> str:
    return "bfloat16" if dtype == BFLOAT16 else dtype.name
