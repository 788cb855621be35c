"""The one compiled kernel: any inputs, summed tile by tile in the first cache, to any output.

Encoding, decoding, adding and reducing are all this: read a tile of each input as float32 in the order given, add, scale, add the
residual, write the tile. One kernel is one compilation and one load from disk, and no operation has arithmetic of its own.
"""

# Numba infers the types of what follows; annotations would be ignored.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

from numba import float32, njit, types, uint8, uint32, uint64

from squinchcomm.kernels import float_lanes as fl
from squinchcomm.kernels import squinch6_lanes as sq
from squinchcomm.kernels.int8 import BLOCK_VALUES as INT8_BLOCK
from squinchcomm.kernels.int8 import LARGEST_SCALE, SMALLEST_MAXIMUM
from squinchcomm.kernels.kinds import BF16, F16, F32, F32_STREAMED, F64, INT8, NOTHING, SQUINCH, SQUINCH_SR
from squinchcomm.kernels.lanes import (
    advance,
    clear_bytes,
    copy_bytes,
    load_f32,
    load_f64,
    load_i64,
    load_pointer,
    load_u8,
    load_u32,
    stack_buffer,
    store_f32,
    store_u8,
    store_u32,
)

TILE = 512
TILE_BYTES = 384
LANE_GROUPS = TILE // 16
INFINITY = 0x7F800000
INT8_SMALLEST, INT8_LARGEST_SCALE = float32(SMALLEST_MAXIMUM), float32(LARGEST_SCALE)

# The kernel's scratch memory, by offset: four tiles of float32, one tile of any type, per-block numbers, a count of blocks.
TOTAL, SCALED, DECODED, STAGE, MAXIMA, SCALES, LARGEST, NONFINITE = 0, 2048, 4096, 6144, 10240, 10752, 11008, 11072
SCRATCH_BYTES = 11136
_scratch = stack_buffer(SCRATCH_BYTES)
TASK_BYTES = 12 * 8

_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
helper: Any = njit(**_OPTIONS)
# Calls cost several ns where a tile takes 35: what runs for every tile of the usual calls is inlined.
inlined: Any = njit(**_OPTIONS, forceinline=True)


@inlined
def _item_bytes(kind):
    if kind == F64:
        return 8
    return 4 if kind in (F32, F32_STREAMED) else 2


@helper
def _start(kind, source, total):
    if kind == F32:
        for group in range(LANE_GROUPS):
            fl.start_f32(source, total, group)
    elif kind == F64:
        for group in range(LANE_GROUPS):
            fl.start_f64(source, total, group)
    elif kind == F16:
        for group in range(LANE_GROUPS):
            fl.start_f16(source, total, group)
    else:
        for group in range(LANE_GROUPS):
            fl.start_bf16(source, total, group)


@helper
def _add(kind, source, total):
    if kind == F32:
        for group in range(LANE_GROUPS):
            fl.add_f32(source, total, group)
    elif kind == F64:
        for group in range(LANE_GROUPS):
            fl.add_f64(source, total, group)
    elif kind == F16:
        for group in range(LANE_GROUPS):
            fl.add_f16(source, total, group)
    else:
        for group in range(LANE_GROUPS):
            fl.add_bf16(source, total, group)


@helper
def _read_plain(kind, source, tile, used, first, total, stage):
    item = _item_bytes(kind)
    here = advance(source, tile * TILE * item)
    if used < TILE:
        clear_bytes(stage, TILE * item)
        copy_bytes(stage, here, used * item)
        here = stage
    if first:
        _start(kind, here, total)
    else:
        _add(kind, here, total)


@helper
def _read_int8(source, count, tile, used, first, total, stage):
    blocks = (count + INT8_BLOCK - 1) // INT8_BLOCK
    codes = advance(source, 4 * blocks + tile * TILE)
    if used < TILE:
        clear_bytes(stage, TILE)
        copy_bytes(stage, codes, used)
        codes = stage
    for block in range(4):
        index = 4 * tile + block
        scale = load_f32(source, index) if index < blocks else float32(0)
        for group in range(8 * block, 8 * block + 8):
            if first:
                fl.start_int8(codes, total, scale, group)
            else:
                fl.add_int8(codes, total, scale, group)


@helper
def _decode_nonfinite(tile, out):
    for block in range(64):
        if load_u8(tile, block) == 255:
            word = load_u32(tile, 32 + block)
            signs = load_u8(tile, 64 + block)
            for value in range(8):
                code = (word >> uint32(4 * value)) & uint32(15)
                sign = uint32((signs >> uint8(value)) & uint8(1)) << uint32(31)
                bits = uint32(0x7FC00000) if code == 15 else uint32(INFINITY) if code == 14 else uint32(0)
                store_u32(out, 64 * value + block, bits | sign)


@inlined
def _read_squinch(source, factor, tile, first, total, scratch, tables):
    here = advance(source, tile * TILE_BYTES)
    decoded, factors = advance(scratch, DECODED), advance(scratch, SCALES)
    nonfinite = sq.block_factors(here, factors, tables) == 255
    if factor == 1.0 and not nonfinite:
        for group in range(4):
            if first:
                sq.decode_group(here, total, factors, group)
            else:
                sq.add_group(here, total, factors, group)
        return
    for group in range(4):
        sq.decode_group(here, decoded, factors, group)
    if nonfinite:
        _decode_nonfinite(here, decoded)
    if factor != 1.0:
        for group in range(LANE_GROUPS):
            fl.rescale(decoded, decoded, factor, group)
    if first:
        _start(F32, decoded, total)
    else:
        _add(F32, decoded, total)


@helper
def _read(kind, source, factor, count, tile, first, total, scratch, tables):
    used = min(count - tile * TILE, TILE)
    stage = advance(scratch, STAGE)
    if kind <= BF16:
        _read_plain(kind, source, tile, used, first, total, stage)
    elif kind == INT8:
        _read_int8(source, count, tile, used, first, total, stage)
    else:
        _read_squinch(source, factor, tile, first, total, scratch, tables)


@helper
def _encode_nonfinite(total, out, maxima, found):
    for block in range(64):
        if load_u32(maxima, block) >= uint32(INFINITY):
            store_u32(found, 0, load_u32(found, 0) + uint32(1))
            word = uint32(0)
            for value in range(8):
                magnitude = load_u32(total, 64 * value + block) & uint32(0x7FFFFFFF)
                code = (
                    uint32(15) if magnitude > uint32(INFINITY) else uint32(14) if magnitude == uint32(INFINITY) else uint32(0)
                )
                word |= code << uint32(4 * value)
            store_u8(out, block, uint8(255))
            store_u32(out, 32 + block, word)


@inlined
def _scale_blocks(total, here, scratch, tables):
    maxima, scales, largest = advance(scratch, MAXIMA), advance(scratch, SCALES), advance(scratch, LARGEST)
    for group in range(4):
        sq.block_scales(total, here, maxima, largest, scales, tables, group)


@inlined
def _write_nearest(total, out, tile, scratch, tables):
    here = advance(out, tile * TILE_BYTES)
    _scale_blocks(total, here, scratch, tables)
    for group in range(4):
        sq.nearest_codes(total, here, advance(scratch, SCALES), group)
    if sq.maxima_nonfinite(advance(scratch, MAXIMA)) != 0:
        _encode_nonfinite(total, here, advance(scratch, MAXIMA), advance(scratch, NONFINITE))


@helper
def _write_stochastic(total, out, tile, seed, scratch, tables):
    here = advance(out, tile * TILE_BYTES)
    _scale_blocks(total, here, scratch, tables)
    for group in range(4):
        sq.stochastic_codes(total, here, advance(scratch, SCALES), group, tile, seed)
    if sq.maxima_nonfinite(advance(scratch, MAXIMA)) != 0:
        _encode_nonfinite(total, here, advance(scratch, MAXIMA), advance(scratch, NONFINITE))


@helper
def _write_int8(total, out, count, tile, used, stage, found):
    blocks = (count + INT8_BLOCK - 1) // INT8_BLOCK
    for block in range((used + INT8_BLOCK - 1) // INT8_BLOCK):
        bits = fl.largest_magnitude(advance(total, block * INT8_BLOCK * 4))
        store_u32(stage, 0, bits)
        largest = load_f32(stage, 0)
        scale, inverse = min(largest / float32(127), INT8_LARGEST_SCALE), float32(127) / largest
        if bits >= uint32(INFINITY):
            store_u32(out, 4 * tile + block, uint32(0x7FC00000))
            store_u32(found, 0, load_u32(found, 0) + uint32(1))
            inverse = float32(0)
        else:
            inverse = inverse if largest >= INT8_SMALLEST else float32(0)
            store_f32(out, 4 * tile + block, scale if largest >= INT8_SMALLEST else float32(0))
        for group in range(8 * block, 8 * block + 8):
            fl.write_int8(total, advance(stage, 64), inverse, group)
    copy_bytes(advance(out, 4 * blocks + tile * TILE), advance(stage, 64), used)


@helper
def _write_plain(kind, total, out, tile, used, stage):
    item = _item_bytes(kind)
    place = advance(out, tile * TILE * item)
    target = place if used == TILE else stage
    for group in range(LANE_GROUPS):
        if kind == F32_STREAMED and used == TILE:
            fl.stream_f32(total, target, group)
        elif kind in (F32, F32_STREAMED):
            fl.start_f32(total, target, group)
        elif kind == F64:
            fl.write_f64(total, target, group)
        elif kind == F16:
            fl.write_f16(total, target, group)
        else:
            fl.write_bf16(total, target, group)
    if used < TILE:
        copy_bytes(place, stage, used * item)


@inlined
def _write(kind, total, out, count, tile, seed, scratch, tables):
    used = min(count - tile * TILE, TILE)
    if kind == SQUINCH:
        _write_nearest(total, out, tile, scratch, tables)
    elif kind == SQUINCH_SR:
        _write_stochastic(total, out, tile, seed, scratch, tables)
    elif kind == INT8:
        _write_int8(total, out, count, tile, used, advance(scratch, STAGE), advance(scratch, NONFINITE))
    elif kind == NOTHING:
        for group in range(4):
            sq.track_maxima(total, advance(scratch, MAXIMA), advance(scratch, LARGEST), group)
    else:
        _write_plain(kind, total, out, tile, used, advance(scratch, STAGE))


@helper
def _keep_residual(kind, total, out, factor, count, tile, residual, scratch, tables):
    used = min(count - tile * TILE, TILE)
    read_kind = SQUINCH if kind == SQUINCH_SR else kind
    decoded, stage = advance(scratch, SCALED), advance(scratch, STAGE)
    _read(read_kind, out, factor, count, tile, True, decoded, scratch, tables)
    for group in range(LANE_GROUPS):
        fl.lost(total, decoded, stage, group)
    copy_bytes(advance(residual, tile * TILE * 4), stage, used * 4)


@helper
def _sum(inputs, n_inputs, count, tile, total, scratch, tables):
    for i in range(n_inputs):
        source, factor = load_pointer(inputs, 3 * i + 1), load_f64(inputs, 3 * i + 2)
        _read(load_i64(inputs, 3 * i), source, factor, count, tile, i == 0, total, scratch, tables)


@inlined
def _transform_tile(
    inputs, n_inputs, count, tile, scale, residual, has_residual, kind, out, factor, back, seed, scratch, tables
):
    used = min(count - tile * TILE, TILE)
    total = advance(scratch, TOTAL)
    plain = scale == float32(1) and has_residual == 0 and used == TILE
    source = load_pointer(inputs, 1)
    if plain and n_inputs == 1 and load_i64(inputs, 0) == F32:
        total = advance(source, tile * TILE * 4)
    else:
        _sum(inputs, n_inputs, count, tile, total, scratch, tables)
    if scale != float32(1):
        for group in range(LANE_GROUPS):
            fl.multiply(total, scale, group)
    if has_residual != 0:
        _read_plain(F32, residual, tile, used, False, total, advance(scratch, STAGE))
    if used < TILE:
        # Padding is +0 whatever scales and foreign bytes made of it: equal values give equal bytes.
        clear_bytes(advance(total, used * 4), (TILE - used) * 4)
    written = total
    if factor != 1.0:
        written = advance(scratch, SCALED)
        for group in range(LANE_GROUPS):
            fl.rescale(total, written, factor, group)
    _write(kind, written, out, count, tile, seed, scratch, tables)
    if has_residual == 2:
        _keep_residual(kind, total, out, back, count, tile, residual, scratch, tables)


def transform(task):
    """Sums encoded and plain inputs, scales, adds a residual, writes.

    Args:
        task: Address of what `kernel_codec.TASK_FORMAT` and `INPUT_FORMAT` describe, 8 bytes each; one argument, because
            ctypes takes 0.1 us for each. The fields:
            0, 1: Number of inputs; elements (nothing is read or written beyond them, except that Squinch has whole tiles).
            2: Float64, multiplies the sum after rounding to float32.
            3, 4: Address of the float32 residual, added to the scaled sum; 0 without, 1 with, 2 if it then becomes what the
            encoding lost.
            5, 6: Kind of the output (NOTHING only looks for the largest magnitude); its address.
            7, 8: Float64, multiplies what is encoded, 2**-exponent; its inverse.
            9: Seed of stochastic rounding.
            10: 0 sums in scratch memory, 1 in the output (float32, not among the inputs, no scale, no residual), 2 in the
            output, which is also the first input.
            11: Address of squinch6_tables.TABLES.
            Then each input: kind, address, float64 factor (1 but for Squinch with an exponent).

    Returns:
        Bits of the largest magnitude in Squinch blocks that are finite throughout; above them, in bits 32 to 63, how many blocks
        of Squinch or int8 that were written are not.
    """
    n_inputs, count, scale = load_i64(task, 0), load_i64(task, 1), float32(load_f64(task, 2))
    residual, has_residual, kind, out = load_pointer(task, 3), load_i64(task, 4), load_i64(task, 5), load_pointer(task, 6)
    factor, back, seed, direct = load_f64(task, 7), load_f64(task, 8), uint64(load_i64(task, 9)), load_i64(task, 10)
    tables, inputs = load_pointer(task, 11), advance(task, TASK_BYTES)
    scratch = _scratch()
    clear_bytes(advance(scratch, LARGEST), 128)
    for tile in range((count + TILE - 1) // TILE):
        if direct != 0 and count - tile * TILE >= TILE:
            total = advance(out, tile * TILE * 4)
            for i in range(direct - 1, n_inputs):
                source, input_factor = load_pointer(inputs, 3 * i + 1), load_f64(inputs, 3 * i + 2)
                if load_i64(inputs, 3 * i) == SQUINCH:
                    _read_squinch(source, input_factor, tile, i == 0, total, scratch, tables)
                else:
                    _read(load_i64(inputs, 3 * i), source, input_factor, count, tile, i == 0, total, scratch, tables)
        else:
            _transform_tile(
                inputs, n_inputs, count, tile, scale, residual, has_residual, kind, out, factor, back, seed, scratch, tables
            )
    if kind == F32_STREAMED:
        fl.stream_fence()
    largest = uint32(0)
    for lane in range(16):
        largest = max(largest, load_u32(advance(scratch, LARGEST), lane))
    return (uint64(load_u32(scratch, NONFINITE // 4)) << uint64(32)) | uint64(largest)


SIGNATURE = types.uint64(types.voidptr)
