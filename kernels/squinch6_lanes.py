"""Squinch tiles in vector form. Bytes and bits equal `squinch6_reference`; the format is described in docs/format.md.

A tile is encoded in three passes over the 64 blocks, which stay in the first cache: block maxima and signs (vectors), the search
for q (scalar: two table look-ups a block beat gathers), codes (vectors).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from squinchcomm.kernels.lanes import FLOAT, I1, I8, I32, I64, WIDTH, Lanes, address, broadcast, constant, emitter, load, store
from squinchcomm.kernels.squinch6_tables import BLOCK_VALUES, TILE_BLOCKS

# Where R and D lie in squinch6_tables.TABLES.
R_OFFSET, D_OFFSET = 1024, 2048
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
    """k + 1/2 as a float, where k is the nearest code of value bits `x`."""
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


@emitter(types.void, types.voidptr, types.voidptr, types.voidptr, types.voidptr, types.int64)
def block_maxima(builder: Any, tile: Any, out: Any, maxima: Any, largest: Any, group: Any) -> None:
    """Sign bytes to `out`, maxima as bits to `maxima`, estimates of q behind them; finite maxima into `largest`."""
    signs = constant(builder, I32, 0)
    maximum = constant(builder, I32, 0)
    for value in reversed(range(BLOCK_VALUES)):
        x = load(builder, I32, _value_address(builder, tile, group, value))
        signs = signs.call("llvm.fshl", x, 1)
        maximum = maximum.maximum(x & MAGNITUDE)
    store(signs.to(I8), _group_address(builder, out, group, 1, TILE_BLOCKS))
    store(maximum, _group_address(builder, maxima, group, 4))
    estimate = (maximum.int_to_float() * Q_PER_BIT + Q_OFFSET).float_to_int().call("llvm.smax", 0).call("llvm.smin", 253)
    store(estimate, _group_address(builder, maxima, group, 4, 4 * TILE_BLOCKS))
    finite = maximum.compare("<", INFINITY).choose(maximum, 0)
    store(load(builder, I32, largest).maximum(finite), largest)


def _table_entry(builder: Any, element: Any, tables: Any, offset: int, index: Any) -> Any:
    pointer = builder.gep(builder.bitcast(address(builder, tables, offset), element.as_pointer()), [index], inbounds=True)
    return builder.load(pointer, align=4)


@emitter(types.void, types.voidptr, types.voidptr, types.voidptr, types.voidptr)
def block_scales(builder: Any, out: Any, maxima: Any, scales: Any, tables: Any) -> None:
    """q of each block to `out` and R(q) to `scales`."""
    for block in range(TILE_BLOCKS):
        maximum = _table_entry(builder, I32, maxima, 4 * block, I64(0))
        estimate = builder.zext(_table_entry(builder, I32, maxima, 4 * (TILE_BLOCKS + block), I64(0)), I64)
        above = builder.icmp_unsigned(">", maximum, _table_entry(builder, I32, tables, 0, estimate))
        q = builder.add(estimate, builder.zext(above, I64))
        builder.store(builder.trunc(q, I8), address(builder, out, block))
        scale = _table_entry(builder, FLOAT, tables, R_OFFSET, q)
        builder.store(scale, builder.bitcast(address(builder, scales, 4 * block), FLOAT.as_pointer()), align=4)


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


@emitter(types.uint64, types.voidptr)
def has_nonfinite_block(builder: Any, tile: Any) -> Any:
    """Not 0 if some q of an encoded tile is 255."""
    found = Lanes(builder, ir.Constant(ir.VectorType(I1, WIDTH), [0] * WIDTH))
    for group in range(GROUPS):
        found = found | load(builder, I8, tile, group * WIDTH).compare("==", 255)
    mask = builder.bitcast(found.value, ir.IntType(WIDTH))
    return builder.zext(mask, I64)


@emitter(types.void, types.voidptr, types.voidptr, types.voidptr)
def block_factors(builder: Any, tile: Any, factors: Any, tables: Any) -> None:
    """D(q) of each block to `factors`."""
    for block in range(TILE_BLOCKS):
        q = builder.zext(builder.load(address(builder, tile, block)), I64)
        factor = _table_entry(builder, FLOAT, tables, D_OFFSET, q)
        builder.store(factor, builder.bitcast(address(builder, factors, 4 * block), FLOAT.as_pointer()), align=4)


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
        store(decoded, _value_address(builder, out, group, value))


@emitter(types.void, types.voidptr, types.voidptr, types.voidptr, types.int64)
def add_group(builder: Any, tile: Any, out: Any, factors: Any, group: Any) -> None:
    """Sixteen blocks of float32 added to `out`."""
    for value, decoded in enumerate(_decoded(builder, tile, factors, group)):
        place = _value_address(builder, out, group, value)
        store(load(builder, FLOAT, place) + decoded, place)


@emitter(types.uint64, types.voidptr)
def maxima_nonfinite(builder: Any, maxima: Any) -> Any:
    """Not 0 if one of the 64 block maxima is not finite."""
    found = Lanes(builder, ir.Constant(ir.VectorType(I1, WIDTH), [0] * WIDTH))
    for group in range(GROUPS):
        found = found | load(builder, I32, maxima, group * WIDTH * 4).compare(">=", INFINITY)
    return builder.zext(builder.bitcast(found.value, ir.IntType(WIDTH)), I64)


@emitter(types.void, types.voidptr)
def prefetch_after(builder: Any, tile: Any) -> None:
    """Asks for the 512 float32 two tiles on. The strided reads of a tile are no pattern that hardware prefetchers follow."""
    signature = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    tile_bytes = TILE_BLOCKS * BLOCK_VALUES * 4
    for line in range(2 * tile_bytes, 3 * tile_bytes, 64):
        # Beyond the end of the array a prefetch is harmless, but the address must not be declared in bounds.
        builder.call(prefetch, [builder.gep(tile, [I64(line)]), I32(0), I32(3), I32(1)])
