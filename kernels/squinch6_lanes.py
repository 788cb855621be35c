"""Squinch tiles in vector form. Bytes and bits equal `squinch6_reference`; the format is described in docs/format.md.

A tile is encoded in two passes, which find it in the first cache: maxima, signs and scales of all blocks, then their codes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from squinchcomm.kernels.lanes import (
    FLOAT,
    I1,
    I8,
    I32,
    I64,
    PREFETCH_BYTES,
    WIDTH,
    Lanes,
    address,
    broadcast,
    constant,
    emitter,
    load,
    load_ahead,
    prefetch,
    store,
    vector,
)
from squinchcomm.kernels.squinch6_tables import BLOCK_VALUES, D_COLUMN, ROW_BYTES, TILE_BLOCKS, TILE_BYTES

GROUPS = TILE_BLOCKS // WIDTH
MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000

# q lies in {estimate, estimate + 1}: float bits are a logarithm, piecewise linear and at most 0.36 steps of q too small.
Q_PER_BIT = float(np.float32(6 * np.log(2) / 2**23))
Q_OFFSET = float(np.float32(128 - 127 * 6 * np.log(2) + 0.68))

# floor(sqrt) in {estimate, estimate + 1}: half the float bits plus a constant is a square root within 3 %, and adding 2^23
# rounds it to an integer. Tests prove it for every float32. SIX_BITS... are exact: codes stay below 2^24.
ROOT_NEAREST, SHIFT_NEAREST, MAGIC_NEAREST = 0x1FB74000, -0.2, 8388608.0
ROOT_STOCHASTIC, SHIFT_STOCHASTIC, MAGIC_STOCHASTIC = 0x1FB6E000, -0.7265625, 8388609.0
HALVES = 0.5 * 0x1111  # what four half-integers leave in a 16-bit word


def _value_address(builder: Any, tile: Any, group: Any, value: int) -> Any:
    lane_bytes = builder.mul(group, I64(WIDTH * 4))
    return address(builder, address(builder, tile, lane_bytes), value * TILE_BLOCKS * 4)


def _group_address(builder: Any, base: Any, group: Any, lane_bytes: int, offset: int = 0) -> Any:
    return address(builder, address(builder, base, builder.mul(group, I64(WIDTH * lane_bytes))), offset)


def nearest_code(x: Lanes, r: Lanes) -> Lanes:
    """Returns k + 1/2 as a float, where k is the nearest code of value bits `x`."""
    u = (x & MAGNITUDE).as_float() * r
    guess = ((u.bits() >> 1) + ROOT_NEAREST).as_float() + SHIFT_NEAREST
    code = (guess + MAGIC_NEAREST) - (MAGIC_NEAREST - 0.5)
    threshold = code.multiply_add(code, 0.125)  # k*k + k + 3/8
    return u.compare(">=", threshold).choose(code + 1.0, code)


def stochastic_code(x: Lanes, r: Lanes, random: Lanes) -> Lanes:
    """The code as a float: up with probability (u - k*k) / (2k + 1), by 16 random bits."""
    u = (x & MAGNITUDE).as_float() * r
    guess = ((u.bits() >> 1) + ROOT_STOCHASTIC).as_float() + SHIFT_STOCHASTIC
    low = (guess + MAGIC_STOCHASTIC) - MAGIC_STOCHASTIC
    high = low + 1.0
    k = u.compare(">=", high * high).choose(high, low)
    chance = random.int_to_float().multiply_add(2.0**-16, 2.0**-17)
    up = (chance * (k + k + 1.0)).compare("<", u - k * k)
    return up.choose(k + 1.0, k).minimum(15.0)


def _pack(codes: list[Lanes], excess: float) -> Lanes:
    """Four codes a half word: Horner's rule in floats is one instruction a code, and exact below 2^24."""
    halves = []
    for part in (codes[:4], codes[4:]):
        total = part[3]
        for code in (part[2], part[1], part[0]):
            total = total.multiply_add(16.0, code)
        halves.append((total - excess if excess else total).float_to_int())
    return halves[0] | (halves[1] << 16)


def _indices(builder: Any, indices: Lanes) -> list[Any]:
    """Sixteen bytes as sixteen scalars; shifting two words is cheaper than extracting sixteen elements."""
    words = builder.bitcast(indices.value, ir.VectorType(I64, 2))
    scalars = []
    for lane in range(WIDTH):
        word = builder.extract_element(words, I32(lane // 8))
        scalars.append(builder.and_(builder.lshr(word, I64(8 * (lane % 8))), I64(0xFF)))
    return scalars


def _shuffle(builder: Any, first: Any, second: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(order)), order))


def look_up_rows(builder: Any, tables: Any, q: Lanes) -> tuple[Lanes, Lanes, Lanes, Lanes]:
    """M(q), R(q), R(q + 1), D(q) of sixteen blocks.

    Sixteen loads of a row and a transposition of 4 x 4 in each quarter: 64 blocks took 37 ns in the encoder where two rounds of
    single loads took 59 and two rounds of AVX-512 gathers about 80 (Zen 5). Columns that nobody uses cost nothing.
    """
    row_type = ir.VectorType(FLOAT, 4)
    rows = []
    for index in _indices(builder, q):
        row = address(builder, tables, builder.mul(index, I64(ROW_BYTES)))
        rows.append(builder.load(builder.bitcast(row, row_type.as_pointer()), align=4))
    quarters = []
    for first in range(4):
        low = _shuffle(builder, rows[first], rows[first + 4], list(range(8)))
        high = _shuffle(builder, rows[first + 8], rows[first + 12], list(range(8)))
        quarters.append(_shuffle(builder, low, high, list(range(WIDTH))))
    lows = [4 * lane + i for lane in range(4) for i in (0, WIDTH, 1, WIDTH + 1)]
    highs = [4 * lane + i for lane in range(4) for i in (2, WIDTH + 2, 3, WIDTH + 3)]
    front = [4 * lane + i for lane in range(4) for i in (0, 1, WIDTH, WIDTH + 1)]
    back = [4 * lane + i for lane in range(4) for i in (2, 3, WIDTH + 2, WIDTH + 3)]
    pairs = [[_shuffle(builder, quarters[i], quarters[i + 1], order) for i in (0, 2)] for order in (lows, highs)]
    columns = [_shuffle(builder, first, second, order) for first, second in pairs for order in (front, back)]
    m, r, r_next, d = (Lanes(builder, column) for column in columns)
    return m, r, r_next, d


def _window(builder: Any, tables: Any, column: int, start: Any, indices: Lanes) -> Lanes:
    """Entries `start + indices` of a column of TABLES, indices below 32: two loads and one instruction."""
    first = address(builder, tables, builder.add(I64(column), builder.shl(start, I64(2))))
    low, high = load(builder, FLOAT, first), load(builder, FLOAT, first, 4 * WIDTH)
    signature = ir.FunctionType(vector(FLOAT), [vector(FLOAT), vector(I32), vector(FLOAT)])
    permute = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512.vpermi2var.ps.512")
    return Lanes(builder, builder.call(permute, [low.value, indices.value, high.value]))


def _signs_and_maximum(builder: Any, tile: Any, group: Any) -> tuple[Lanes, Lanes]:
    signs = constant(builder, I32, 0)
    maximum = constant(builder, I32, 0)
    for value in reversed(range(BLOCK_VALUES)):
        x = load_ahead(builder, I32, _value_address(builder, tile, group, value))
        signs = signs.call("llvm.fshl", x, 1)
        maximum = maximum.maximum(x & MAGNITUDE)
    return signs, maximum


@emitter(types.void, types.voidptr, types.voidptr, types.voidptr, types.int64)
def track_maxima(builder: Any, tile: Any, maxima: Any, largest: Any, group: Any) -> None:
    """Maxima of sixteen blocks, as bits, to `maxima`; finite ones into `largest`."""
    _keep_maximum(builder, _signs_and_maximum(builder, tile, group)[1], maxima, largest, group)


def _keep_maximum(builder: Any, maximum: Lanes, maxima: Any, largest: Any, group: Any) -> None:
    store(maximum, _group_address(builder, maxima, group, 4))
    finite = maximum.compare("<", INFINITY).choose(maximum, 0)
    store(load(builder, I32, largest).maximum(finite), largest)


@emitter(types.void, types.voidptr, types.voidptr, types.voidptr, types.voidptr, types.voidptr, types.voidptr, types.int64)
def block_scales(builder: Any, tile: Any, out: Any, maxima: Any, largest: Any, scales: Any, tables: Any, group: Any) -> None:
    """The q and sign bytes of sixteen blocks to `out`, R(q) to `scales`, their maxima as above."""
    signs, maximum = _signs_and_maximum(builder, tile, group)
    estimate = (
        maximum.int_to_float().multiply_add(Q_PER_BIT, Q_OFFSET).float_to_int().call("llvm.smax", 0).call("llvm.smin", 253)
    )
    m, r, r_next, _ = look_up_rows(builder, tables, estimate.to(I8))
    above = maximum.compare(">", m.bits())
    store(above.choose(estimate + 1, estimate).to(I8), _group_address(builder, out, group, 1))
    store(above.choose(r_next, r), _group_address(builder, scales, group, 4))
    store(signs.to(I8), _group_address(builder, out, group, 1, TILE_BLOCKS))
    _keep_maximum(builder, maximum, maxima, largest, group)


@emitter(types.void, types.voidptr, types.voidptr, types.voidptr, types.int64)
def nearest_codes(builder: Any, tile: Any, out: Any, scales: Any, group: Any) -> None:
    """Code words of sixteen blocks."""
    r = load(builder, FLOAT, _group_address(builder, scales, group, 4))
    values = [load(builder, I32, _value_address(builder, tile, group, value)) for value in range(BLOCK_VALUES)]
    word = _pack([nearest_code(x, r) for x in values], HALVES)
    store(word, _group_address(builder, out, group, 4, 2 * TILE_BLOCKS))


def philox(builder: Any, counter_low: Lanes, counter_high: Lanes, seed: Any) -> list[Lanes]:
    """Philox4x32-10 (Salmon et al., SC 2011) with counter (low, high, 0, 0): four words a lane."""
    keys = [broadcast(builder, builder.trunc(seed, I32)), broadcast(builder, builder.trunc(builder.lshr(seed, I64(32)), I32))]
    c = [counter_low, counter_high, constant(builder, I32, 0), constant(builder, I32, 0)]
    for _ in range(10):
        first = c[0].to(I64) * 0xD2511F53
        second = c[2].to(I64) * 0xCD9E8D57
        c = [(second >> 32).to(I32) ^ c[1] ^ keys[0], second.to(I32), (first >> 32).to(I32) ^ c[3] ^ keys[1], first.to(I32)]
        keys = [keys[0] + 0x9E3779B9, keys[1] + 0xBB67AE85]
    return c


@emitter(types.void, types.voidptr, types.voidptr, types.voidptr, types.int64, types.int64, types.uint64)
def stochastic_codes(builder: Any, tile: Any, out: Any, scales: Any, group: Any, tile_index: Any, seed: Any) -> None:
    """Code words of sixteen blocks; block j of tile t draws with counter 64 t + j, value b takes 16-bit piece b."""
    first = builder.add(builder.mul(tile_index, I64(TILE_BLOCKS)), builder.mul(group, I64(WIDTH)))
    lane = Lanes(builder, ir.Constant(ir.VectorType(I32, WIDTH), list(range(WIDTH))))
    # Sixteen counters of a group never carry into the upper word: the first is a multiple of sixteen.
    low = broadcast(builder, builder.trunc(first, I32)) + lane
    high = broadcast(builder, builder.trunc(builder.lshr(first, I64(32)), I32))
    words = philox(builder, low, high, seed)
    r = load(builder, FLOAT, _group_address(builder, scales, group, 4))
    codes = []
    for value in range(BLOCK_VALUES):
        x = load(builder, I32, _value_address(builder, tile, group, value))
        piece = words[value // 2] >> 16 if value % 2 else words[value // 2] & 0xFFFF
        codes.append(stochastic_code(x, r, piece))
    store(_pack(codes, 0.0), _group_address(builder, out, group, 4, 2 * TILE_BLOCKS))


@emitter(types.int64, types.voidptr, types.voidptr, types.voidptr)
def block_factors(builder: Any, tile: Any, factors: Any, tables: Any) -> Any:
    """D(q) of a tile's blocks to `factors`. Returns the largest q.

    Where the block maxima of a tile lie within a factor of 170, as those of gradients mostly do, its 64 q lie within 32, and
    AVX-512 finds entries of a table that short in one instruction. (The encoder gains nothing by it: it would have to wait for
    the maxima of the whole tile.)
    """
    for line in range(0, TILE_BYTES, 64):
        prefetch(builder, tile, 2 * TILE_BYTES + line)
    q_bytes = [load(builder, I8, tile, WIDTH * group) for group in range(GROUPS)]
    q = [each.to(I32) for each in q_bytes]
    low = functools.reduce(Lanes.minimum, q).reduce("umin")
    high = functools.reduce(Lanes.maximum, q).reduce("umax")

    def by_rows() -> None:
        for group in range(GROUPS):
            *_, d = look_up_rows(builder, tables, q_bytes[group])
            store(d, factors, 4 * WIDTH * group)

    if "avx512f" not in builder.features:
        by_rows()
        return builder.zext(high, I64)
    close = builder.icmp_unsigned("<", builder.sub(high, low), I32(2 * WIDTH))
    with builder.if_else(close, likely=True) as (then, otherwise):
        with then:
            for group in range(GROUPS):
                d = _window(builder, tables, D_COLUMN, builder.zext(low, I64), q[group] - broadcast(builder, low))
                store(d, factors, 4 * WIDTH * group)
        with otherwise:
            by_rows()
    return builder.zext(high, I64)


def _decoded(builder: Any, tile: Any, factors: Any, group: Any) -> list[Lanes]:
    factor = load(builder, FLOAT, _group_address(builder, factors, group, 4))
    word = load(builder, I32, _group_address(builder, tile, group, 4, 2 * TILE_BLOCKS))
    signs = load(builder, I8, _group_address(builder, tile, group, 1, TILE_BLOCKS)).to(I32)
    values = []
    for value in range(BLOCK_VALUES):
        code = ((word >> (4 * value)) & 15).int_to_float()
        magnitude = code * code * factor
        sign = (signs << (31 - value)) & 0x80000000
        values.append((magnitude.bits() | sign).as_float())
    return values


@emitter(types.void, types.voidptr, types.voidptr, types.voidptr, types.int64)
def decode_group(builder: Any, tile: Any, out: Any, factors: Any, group: Any) -> None:
    """Sixteen blocks of float32 to `out`."""
    for value, decoded in enumerate(_decoded(builder, tile, factors, group)):
        place = _value_address(builder, out, group, value)
        prefetch(builder, place, PREFETCH_BYTES, write=True)
        store(decoded, place)


@emitter(types.void, types.voidptr, types.voidptr, types.voidptr, types.int64)
def add_group(builder: Any, tile: Any, out: Any, factors: Any, group: Any) -> None:
    """Sixteen blocks of float32 added to `out`."""
    for value, decoded in enumerate(_decoded(builder, tile, factors, group)):
        place = _value_address(builder, out, group, value)
        store(load_ahead(builder, FLOAT, place) + decoded, place)


@emitter(types.uint64, types.voidptr)
def maxima_nonfinite(builder: Any, maxima: Any) -> Any:
    """Not 0 if one of the 64 block maxima is not finite."""
    found = Lanes(builder, ir.Constant(ir.VectorType(I1, WIDTH), [0] * WIDTH))
    for group in range(GROUPS):
        found = found | load(builder, I32, maxima, group * WIDTH * 4).compare(">=", INFINITY)
    return builder.zext(builder.bitcast(found.value, ir.IntType(WIDTH)), I64)
