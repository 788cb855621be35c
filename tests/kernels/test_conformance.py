"""Every codec against every shared check."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from squinchcomm.kernels import get_codec
from tests.conformance import codec_checks
from tests.conformance.codec_checks import Bound

CODECS = ("none", "bf16", "int8", "squinch6", "squinch6-sr")


def block_maximum(values: np.ndarray, block: int, stride: int) -> np.ndarray:
    """For each element the largest magnitude in its block: `block` elements, `stride` apart."""
    padded = np.zeros(-(-values.size // (block * stride)) * block * stride)
    padded[: values.size] = np.abs(values)
    shaped = padded.reshape(-1, block, stride)
    return np.broadcast_to(shaped.max(axis=1, keepdims=True), shaped.shape).reshape(-1)[: values.size]


def squinch_bound(share: float) -> Bound:
    def bound(values: np.ndarray) -> np.ndarray:
        largest = np.abs(values).max(initial=0)
        exponent = 0.0 if 2.0**-16 <= largest <= 2.0**28 or largest == 0 else np.floor(np.log2(largest))
        smallest_scale = 6.42e-10 * 2.0**exponent
        return share * np.maximum(block_maximum(values, 8, 64), smallest_scale * 1.0) + 2.0**-149

    return bound


def int8_bound(values: np.ndarray) -> np.ndarray:
    largest = block_maximum(values, 128, 1)
    return np.where(largest < 2.0**-118, 2.0**-118, largest / 254 * 1.0001)


BOUNDS: dict[str, Bound] = {
    "none": lambda values: np.zeros(values.size),
    "bf16": lambda values: np.abs(values.astype(np.float64)) * 2.0**-8 + 2.0**-134,
    "int8": int8_bound,
    "squinch6": squinch_bound(0.071),
    "squinch6-sr": squinch_bound(0.15),
}


@pytest.mark.parametrize("check", [c for c in codec_checks.CHECKS if c not in codec_checks.BOUND_CHECKS])
@pytest.mark.parametrize("name", CODECS)
def test_check(name: str, check: Callable[..., None]) -> None:
    check(get_codec(name))


@pytest.mark.parametrize("check", codec_checks.BOUND_CHECKS)
@pytest.mark.parametrize("name", CODECS)
def test_bound(name: str, check: Callable[..., None]) -> None:
    check(get_codec(name), BOUNDS[name])
