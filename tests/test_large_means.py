"""Averages of values near the end of their type: a mean that is finite is never lost in a sum that is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from squinchcomm.collectives.reduction import reduce_arrays
from squinchcomm.communicator import Communicator
from squinchcomm.kernels.dtypes import BFLOAT16, dtype_name, from_float32
from tests.conformance.collective_checks import same_bits, tolerance, wide
from tests.worlds import run_world

LARGE = {"float32": 3e38, "float64": 1.7e308, "complex64": 2e38, "float16": 6e4, "bfloat16": 3e38}
COUNT = 40_000  # more than two blocks of the lossless reduction


def inputs(dtype: Any, ranks: int) -> list[np.ndarray]:
    """One array a rank: every third element ordinary, the others so large that sums of most overflow."""
    dtype = np.dtype(dtype)
    arrays = []
    for rank in range(ranks):
        rng = np.random.default_rng(rank)
        values = rng.uniform(0.5, 1.0, COUNT) * LARGE[dtype_name(dtype)]
        values[::3] = rng.standard_normal(values[::3].size)
        if dtype == BFLOAT16:
            arrays.append(from_float32(values.astype(np.float32), BFLOAT16))
        else:
            arrays.append((values - 1j * values[::-1] if dtype.kind == "c" else values).astype(dtype))
    return arrays


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.complex64, np.float16, BFLOAT16], ids=lambda d: dtype_name(np.dtype(d))
)
def test_lossless_means(dtype: Any) -> None:
    for ranks in (2, 3, 4, 7):
        arrays = inputs(dtype, ranks)
        mean = np.empty_like(arrays[0])
        reduce_arrays(arrays, mean, "avg", ranks)
        exact = np.sum([wide(array).astype(np.clongdouble) / ranks for array in arrays], axis=0)
        magnitude = np.sum([np.abs(wide(array)) / ranks for array in arrays], axis=0)
        assert np.all(np.abs(wide(mean) - exact) <= tolerance(np.dtype(dtype)) * magnitude)


def test_means_that_need_no_help_have_the_usual_bits() -> None:
    arrays = inputs(np.float32, 3)
    mean = np.empty_like(arrays[0])
    reduce_arrays(arrays, mean, "avg", 3)
    with np.errstate(over="ignore"):
        usual = (arrays[0] + arrays[1] + arrays[2]) / np.float32(3)
    finite = np.isfinite(usual)
    assert 0 < finite.sum() < COUNT
    np.testing.assert_array_equal(mean[finite], usual[finite])


def test_infinities_and_nans_are_not_mended_away() -> None:
    arrays = inputs(np.float32, 4)
    arrays[1][1], arrays[2][2], arrays[0][4], arrays[3][4] = np.inf, np.nan, np.inf, -np.inf
    mean = np.empty_like(arrays[0])
    reduce_arrays(arrays, mean, "avg", 4)
    assert mean[1] == np.inf and np.isnan(mean[2]) and np.isnan(mean[4]) and np.isfinite(mean[5])
    reduce_arrays(arrays, mean, "sum", 4)
    assert mean[5] == np.inf


@pytest.mark.parametrize("codec", ["none", "squinch6", "squinch6-sr"])
def test_means_over_ranks(codec: str) -> None:
    def body(comm: Communicator) -> np.ndarray:
        array = inputs(np.float32, 3)[comm.rank]
        comm.allreduce(array, "avg", codec=codec)
        part = np.empty(COUNT // 4, np.float32)
        whole = inputs(np.float32, 3)[comm.rank][: 3 * part.size]
        comm.reduce_scatter(part, whole, "avg", codec=codec)
        return np.concatenate([array, part if comm.rank == 0 else array[: part.size]])

    results = run_world(3, body, min_compress_bytes=0)
    exact = np.mean([wide(array) for array in inputs(np.float32, 3)], axis=0)
    same_bits([result[:COUNT] for result in results])
    for got, expected in ((results[0][:COUNT], exact), (results[0][COUNT:], exact[: COUNT // 4])):
        # The ordinary elements share blocks of eight with large ones, beside which they are zeros.
        large = np.arange(got.size) % 3 != 0
        assert np.all(np.isfinite(got))
        assert np.all(np.abs(got - expected)[large] <= (0.3 if codec != "none" else 1e-6) * expected[large])


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_other_codecs_overflow_to_what_is_not_finite(codec: str) -> None:
    def body(comm: Communicator) -> np.ndarray:
        array = inputs(np.float32, 3)[comm.rank]
        comm.allreduce(array, "avg", codec=codec)
        return array

    got = run_world(3, body, min_compress_bytes=0)[0]
    exact = np.mean([wide(array) for array in inputs(np.float32, 3)], axis=0)
    large = np.isfinite(got) & (np.arange(COUNT) % 3 != 0)
    assert not np.all(np.isfinite(got))
    assert np.all(np.abs(got - exact)[large] <= 0.05 * exact[large])
