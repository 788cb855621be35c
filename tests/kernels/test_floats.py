"""Conversions between element types inside the kernel, for every 16-bit float and around every rounding boundary."""

from __future__ import annotations

import numpy as np
import pytest

from squinchcomm.kernels import get_codec
from squinchcomm.kernels.dtypes import BFLOAT16, FLOAT16, FLOAT64, from_float32, to_float32
from tests.conformance.codec_checks import same_bits

CODEC = get_codec("bf16")  # `reduce` of plain inputs is the same in every codec
ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)


def _float32_near(values: np.ndarray) -> np.ndarray:
    finite = np.unique(values[np.isfinite(values)])
    middles = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    raw = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
    return np.concatenate([values, middles, *near, raw])


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])
def test_every_16_bit_float(dtype: np.dtype) -> None:
    stored = ALL_16_BITS.view(dtype)
    exact = to_float32(stored)
    assert same_bits(CODEC.reduce([stored], np.zeros(exact.size, np.float32)), exact)
    values = _float32_near(exact)
    rounded = CODEC.reduce([values], np.zeros(values.size, dtype))
    assert same_bits(to_float32(rounded), to_float32(from_float32(values, dtype)))


def test_float64() -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate(
        [rng.standard_normal(5000) * 10.0 ** rng.integers(-50, 50, 5000), [1e300, -1e300, np.nan, np.inf, 1e-320]]
    )
    assert same_bits(CODEC.reduce([values], np.zeros(values.size, np.float32)), to_float32(values))
    narrow = to_float32(values)
    wide = CODEC.reduce([narrow], np.zeros(values.size, FLOAT64))
    np.testing.assert_array_equal(wide, narrow.astype(np.float64))
