"""Squinch: blocks of eight values in 48 bits, a logarithmic scale and square-root codes. Format: docs/format.md."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from squinchcomm.errors import WireFormatError
from squinchcomm.kernels.arguments import data_address, element_count
from squinchcomm.kernels.dtypes import FLOAT32
from squinchcomm.kernels.kernel_codec import MAGNITUDE_BITS, Input, KernelCodec, call_kernel
from squinchcomm.kernels.kinds import NOTHING, SQUINCH, SQUINCH_SR
from squinchcomm.kernels.squinch6_tables import (
    EXPONENT_MAX,
    EXPONENT_MIN,
    PLAIN_MAX,
    PLAIN_MIN,
    TILE_BYTES,
    TILE_VALUES,
    TRAILER_BYTES,
)

# An exponent is that of the array's largest magnitude. If those of all encoded summands together lie below this, their sum cannot
# carry even the largest float32 over the edge.
_LARGE = 2.0**100

_TRAILER = struct.Struct("<iI")  # exponent, reserved: 0

_PLAIN_MIN_BITS, _PLAIN_MAX_BITS = (int(np.float32(edge).view(np.uint32)) for edge in (PLAIN_MIN, PLAIN_MAX))


class Squinch6(KernelCodec):
    """Nearest rounding."""

    name = "squinch6"
    wire_id = 3
    wire_version = 1
    bits_per_element = 6.0
    tile_size = TILE_VALUES
    rounding: ClassVar[Literal["nearest", "stochastic"]] = "nearest"
    nonfinite_rule = "A block with a NaN or infinity keeps those and decodes its finite elements to 0."
    error_bound = "|error| <= 6.5 % of the block scale M(q): at most 7.2 % of the largest magnitude of its block of 8."
    encoded_kind = SQUINCH

    def encoded_nbytes(self, count: int, dtype: Any = FLOAT32) -> int:
        return -(-element_count(count) // TILE_VALUES) * TILE_BYTES + TRAILER_BYTES

    def _encode_sum(
        self,
        inputs: list[Input],
        count: int,
        out: np.ndarray,
        scale: float,
        residual: np.ndarray | None,
        seed: int,
        dtype: np.dtype,
    ) -> None:
        # Almost every call needs no exponent, so it is encoded before that is known. A residual is updated on the way and
        # would be lost, so there the magnitudes are looked at first.
        kind, place = self.encoded_kind, data_address(out)
        first_kind = kind if residual is None else NOTHING
        outcome = call_kernel(inputs, count, first_kind, place, scale=scale, residual=residual, seed=seed)
        exponent = exponent_for(outcome & MAGNITUDE_BITS)
        if exponent or residual is not None:
            factor = math.ldexp(1.0, -exponent)
            outcome = call_kernel(inputs, count, kind, place, scale=scale, residual=residual, factor=factor, seed=seed)
        self._note(outcome)
        _TRAILER.pack_into(out.data, out.size - TRAILER_BYTES, exponent, 0)

    def _headroom(self, inputs: Sequence[Input]) -> float:
        largest = max((factor for kind, _, factor in inputs if kind == SQUINCH), default=0.0)
        return float(1 << (len(inputs) - 1).bit_length()) if largest * len(inputs) >= _LARGE else 0.0

    def _encoded_input(self, encoded: np.ndarray, dtype: Any) -> Input:
        return SQUINCH, data_address(encoded), math.ldexp(1.0, read_exponent(encoded))


class Squinch6SR(Squinch6):
    """Stochastic rounding: the expected decoded value is the value."""

    name = "squinch6-sr"
    wire_id = 4
    rounding = "stochastic"
    error_bound = "|error| < 12.9 % of the block scale M(q): less than 15 % of the largest magnitude of its block of 8."
    encoded_kind = SQUINCH_SR

    def _checked_seed(self, seed: int | None) -> int:
        if seed is None:
            raise ValueError("seed is None; squinch6-sr needs a 64-bit seed for its random numbers")
        if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
            raise TypeError(f"seed must be an integer, not {type(seed).__name__}")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is {seed}; it must lie in 0 .. 2**64 - 1")
        return int(seed)


def exponent_for(magnitude_bits: int) -> int:
    """The power of two that brings a magnitude, given as float32 bits, into [1, 2); 0 if the format covers it without."""
    if magnitude_bits == 0 or _PLAIN_MIN_BITS <= magnitude_bits <= _PLAIN_MAX_BITS:
        return 0
    (magnitude,) = struct.unpack("<f", struct.pack("<I", magnitude_bits))
    return math.frexp(magnitude)[1] - 1


def read_exponent(encoded: np.ndarray) -> int:
    """The exponent in the trailer of an encoded array; WireFormatError if no encoder writes such a trailer."""
    exponent, reserved = _TRAILER.unpack_from(encoded.data, encoded.size - TRAILER_BYTES)
    if reserved or not EXPONENT_MIN <= exponent <= EXPONENT_MAX:
        raise WireFormatError(f"squinch trailer has exponent {exponent} and reserved bits {reserved:#x}: not our format")
    return int(exponent)
