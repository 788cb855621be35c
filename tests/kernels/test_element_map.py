"""The code of every float32 u in [0, 226]: what the kernels compute equals the thresholds of the format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numba import cfunc, int64, types, uint32, uint64

from squinchcomm.kernels.lanes import FLOAT, I32, I64, WIDTH, Lanes, broadcast, constant, emitter
from squinchcomm.kernels.squinch6_lanes import nearest_code, stochastic_code
from squinchcomm.kernels.squinch6_tables import NEAREST

END = int(np.float32(226).view(np.uint32)) + 1
RANDOM = (0, 0x7FFF, 0x8000, 0xFFFF)


def _steps(u: Lanes, thresholds: Any) -> Lanes:
    count = constant(u.builder, FLOAT, 0)
    for threshold in thresholds:
        count = count + u.compare(">=", float(threshold)).choose(constant(u.builder, FLOAT, 1), 0.0)
    return count


def _consecutive(builder: Any, first: Any) -> Lanes:
    return broadcast(builder, first) + Lanes(builder, ir.Constant(ir.VectorType(I32, WIDTH), list(range(WIDTH))))


def _any(differs: Lanes) -> Any:
    return differs.builder.zext(differs.builder.bitcast(differs.value, ir.IntType(WIDTH)), I64)


@emitter(types.uint64, types.uint32)
def nearest_mismatch(builder: Any, first: Any) -> Any:
    x = _consecutive(builder, first)
    code = nearest_code(x, constant(builder, FLOAT, 1)) - 0.5
    return _any(code.compare("!=", _steps(x.as_float(), NEAREST)))


@emitter(types.uint64, types.uint32, types.uint32)
def stochastic_mismatch(builder: Any, first: Any, random: Any) -> Any:
    x = _consecutive(builder, first)
    u, piece = x.as_float(), broadcast(builder, random)
    code = stochastic_code(x, constant(builder, FLOAT, 1), piece)
    k = _steps(u, [k * k for k in range(1, 16)])
    chance = (piece.int_to_float() + 0.5) / 65536.0
    up = (chance * (k * 2.0 + 1.0)).compare("<", u - k * k)
    expected = up.choose(k + 1.0, k).minimum(15.0)
    return _any(code.compare("!=", expected))


def nearest_mismatches(end):  # type: ignore[no-untyped-def]
    found = uint64(0)
    for first in range(0, end, 16):
        found += uint64(nearest_mismatch(uint32(first)) != 0)
    return found


def stochastic_mismatches(end, random):  # type: ignore[no-untyped-def]
    found = uint64(0)
    for first in range(0, end, 16):
        found += uint64(stochastic_mismatch(uint32(first), random) != 0)
    return found


def test_nearest_for_every_float() -> None:
    check = cfunc(uint64(int64))(nearest_mismatches).ctypes
    assert check(END) == 0


@pytest.fixture(scope="module")
def stochastic_check() -> Any:
    return cfunc(uint64(int64, uint32))(stochastic_mismatches).ctypes


@pytest.mark.parametrize("random", RANDOM)
def test_stochastic_for_every_float(stochastic_check: Any, random: int) -> None:
    assert stochastic_check(END, random) == 0


def test_the_check_can_fail() -> None:
    """A wrong threshold is seen: the floats around it are really visited."""

    @emitter(types.uint64, types.uint32)
    def shifted_mismatch(builder: Any, first: Any) -> Any:
        x = _consecutive(builder, first)
        thresholds = NEAREST.copy()
        thresholds[7] = np.nextafter(thresholds[7], np.float32(np.inf))
        return _any((nearest_code(x, constant(builder, FLOAT, 1)) - 0.5).compare("!=", _steps(x.as_float(), thresholds)))

    def count(start, end):  # type: ignore[no-untyped-def]
        found = uint64(0)
        for first in range(start, end, 16):
            found += uint64(shifted_mismatch(uint32(first)) != 0)
        return found

    middle = int(NEAREST[7].view(np.uint32)) // 16 * 16
    assert cfunc(uint64(int64, int64))(count).ctypes(middle - 1600, middle + 1600) == 1
