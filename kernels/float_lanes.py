"""Groups of sixteen elements in vector form: conversions between float32 and the other element types, int8 blocks, arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from squinchcomm.kernels.lanes import (
    DOUBLE,
    FLOAT,
    HALF,
    I8,
    I16,
    I32,
    I64,
    WIDTH,
    Lanes,
    address,
    broadcast,
    constant,
    emitter,
    load,
    load_ahead,
    store,
)

FLOAT_MAX_BITS = 0x7F7FFFFF


def _place(builder: Any, base: Any, group: Any, element_bytes: int) -> Any:
    return address(builder, base, builder.mul(group, I64(WIDTH * element_bytes)))


def _read_f32(builder: Any, base: Any, group: Any) -> Lanes:
    return load_ahead(builder, FLOAT, _place(builder, base, group, 4))


def _scratch_f32(builder: Any, base: Any, group: Any) -> Lanes:
    return load(builder, FLOAT, _place(builder, base, group, 4))


def _read_f64(builder: Any, base: Any, group: Any) -> Lanes:
    return load_ahead(builder, DOUBLE, _place(builder, base, group, 8)).to(FLOAT)


def _read_f16(builder: Any, base: Any, group: Any) -> Lanes:
    place = _place(builder, base, group, 2)
    if _has_half(builder):
        return load_ahead(builder, HALF, place).to(FLOAT)
    bits = load_ahead(builder, I16, place).to(I32)
    # The exponent is moved by a multiplication, which also normalises subnormals; infinity and NaN get theirs by hand.
    shifted = (bits & 0x7FFF) << 13
    finite = (shifted.as_float() * 2.0**112).bits()
    magnitude = shifted.compare("<", 0x7C00 << 13).choose(finite, shifted | 0x7F800000)
    return (magnitude | ((bits & 0x8000) << 16)).as_float()


def _has_half(builder: Any) -> bool:
    """Whether LLVM has instructions for float16: otherwise it calls functions that nobody provides."""
    return not builder.module.triple.startswith(("x86", "i386", "i686")) or "f16c" in builder.features


def _read_bf16(builder: Any, base: Any, group: Any) -> Lanes:
    return (load_ahead(builder, I16, _place(builder, base, group, 2)).to(I32) << 16).as_float()


def _start(read: Callable[..., Lanes], name: str) -> Any:
    def emit(builder: Any, source: Any, total: Any, group: Any) -> None:
        store(read(builder, source, group), _place(builder, total, group, 4))

    emit.__name__ = f"start_{name}"
    return emitter(types.void, types.voidptr, types.voidptr, types.int64)(emit)


def _add(read: Callable[..., Lanes], name: str) -> Any:
    def emit(builder: Any, source: Any, total: Any, group: Any) -> None:
        place = _place(builder, total, group, 4)
        store(load(builder, FLOAT, place) + read(builder, source, group), place)

    emit.__name__ = f"add_{name}"
    return emitter(types.void, types.voidptr, types.voidptr, types.int64)(emit)


# (source, total, group): group `group` of `source` becomes the total, or is added to it.
start_f32, add_f32 = _start(_read_f32, "f32"), _add(_read_f32, "f32")
start_f64, add_f64 = _start(_read_f64, "f64"), _add(_read_f64, "f64")
start_f16, add_f16 = _start(_read_f16, "f16"), _add(_read_f16, "f16")
start_bf16, add_bf16 = _start(_read_bf16, "bf16"), _add(_read_bf16, "bf16")


@emitter(types.void, types.voidptr, types.voidptr, types.int64)
def stream_f32(builder: Any, total: Any, out: Any, group: Any) -> None:
    """float32 written past the caches; `out` is a multiple of 16."""
    store(_scratch_f32(builder, total, group), _place(builder, out, group, 4), streaming=True)


@emitter(types.void)
def stream_fence(builder: Any) -> None:
    """Makes streamed stores visible before any later store: other threads may read the memory."""
    builder.fence("seq_cst")


@emitter(types.void, types.voidptr, types.voidptr, types.int64)
def write_f64(builder: Any, total: Any, out: Any, group: Any) -> None:
    """Exact."""
    store(_scratch_f32(builder, total, group).to(DOUBLE), _place(builder, out, group, 8))


@emitter(types.void, types.voidptr, types.voidptr, types.int64)
def write_f16(builder: Any, total: Any, out: Any, group: Any) -> None:
    """Nearest even; a NaN is made quiet."""
    values = _scratch_f32(builder, total, group)
    place = _place(builder, out, group, 2)
    if _has_half(builder):
        store(values.to(HALF), place)
        return
    bits = values.bits()
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + ((magnitude >> 13) & 1) + (0xFFF - (112 << 23) & 0xFFFFFFFF)) >> 13
    subnormal = (magnitude.as_float() + 0.5).bits() - 0x3F000000  # the addition rounds at the last bit of a half
    finite = magnitude.compare("<", 113 << 23).choose(subnormal, normal)
    special = magnitude.compare(">", 0x7F800000).choose(constant(builder, I32, 0x7E00), 0x7C00)
    half = magnitude.compare("<", 143 << 23).choose(finite, special)
    store((half | ((bits >> 16) & 0x8000)).to(I16), place)


@emitter(types.void, types.voidptr, types.voidptr, types.int64)
def write_bf16(builder: Any, total: Any, out: Any, group: Any) -> None:
    """Nearest even; a NaN keeps its upper bits and is made quiet."""
    bits = _scratch_f32(builder, total, group).bits()
    upper = bits >> 16
    rounded = (bits + (upper & 1) + 0x7FFF) >> 16
    is_nan = (bits & 0x7FFFFFFF).compare(">", 0x7F800000)
    store(is_nan.choose(upper | 0x40, rounded).to(I16), _place(builder, out, group, 2))


@emitter(types.void, types.voidptr, types.float32, types.int64)
def multiply(builder: Any, total: Any, factor: Any, group: Any) -> None:
    """In place."""
    place = _place(builder, total, group, 4)
    store(load(builder, FLOAT, place) * broadcast(builder, factor), place)


@emitter(types.void, types.voidptr, types.voidptr, types.float64, types.int64)
def rescale(builder: Any, source: Any, out: Any, factor: Any, group: Any) -> None:
    """float32(float64(x) * factor), where a finite x stays finite."""
    x = _scratch_f32(builder, source, group)
    scaled = (x.to(DOUBLE) * broadcast(builder, factor)).to(FLOAT)
    capped = ((x.bits() & 0x80000000) | FLOAT_MAX_BITS).as_float()
    overflowed = (scaled.bits() & 0x7FFFFFFF).compare("==", 0x7F800000) & (x.bits() & 0x7FFFFFFF).compare("<", 0x7F800000)
    store(overflowed.choose(capped, scaled), _place(builder, out, group, 4))


@emitter(types.void, types.voidptr, types.voidptr, types.voidptr, types.int64)
def lost(builder: Any, total: Any, decoded: Any, residual: Any, group: Any) -> None:
    """Total - decoded, 0 where either is not finite."""
    exact, coded = _scratch_f32(builder, total, group), _scratch_f32(builder, decoded, group)
    finite = (exact.bits() & 0x7F800000).compare("<", 0x7F800000) & (coded.bits() & 0x7F800000).compare("<", 0x7F800000)
    store(finite.choose(exact - coded, 0.0), _place(builder, residual, group, 4))


@emitter(types.uint32, types.voidptr)
def largest_magnitude(builder: Any, block: Any) -> Any:
    """Largest magnitude of 128 float32, as bits: at least 0x7f800000 if one is not finite."""
    largest = load(builder, I32, block) & 0x7FFFFFFF
    for group in range(1, 128 // WIDTH):
        largest = largest.maximum(load(builder, I32, block, group * WIDTH * 4) & 0x7FFFFFFF)
    return largest.reduce("umax")


@emitter(types.void, types.voidptr, types.voidptr, types.float32, types.int64)
def write_int8(builder: Any, total: Any, out: Any, factor: Any, group: Any) -> None:
    """round(x * factor), nearest even, for |x * factor| <= 127.5."""
    scaled = (_scratch_f32(builder, total, group) * broadcast(builder, factor)).call("llvm.rint")
    store(scaled.float_to_int().to(I8), _place(builder, out, group, 1))


def _int8_values(builder: Any, codes: Any, scale: Any, group: Any) -> Lanes:
    code = load(builder, I8, _place(builder, codes, group, 1))
    signed = Lanes(builder, builder.sext(code.value, ir.VectorType(I32, WIDTH)))
    return signed.int_to_float() * broadcast(builder, scale)


@emitter(types.void, types.voidptr, types.voidptr, types.float32, types.int64)
def start_int8(builder: Any, codes: Any, total: Any, scale: Any, group: Any) -> None:
    """Decoded codes become the total."""
    store(_int8_values(builder, codes, scale, group), _place(builder, total, group, 4))


@emitter(types.void, types.voidptr, types.voidptr, types.float32, types.int64)
def add_int8(builder: Any, codes: Any, total: Any, scale: Any, group: Any) -> None:
    """Decoded codes are added to the total."""
    place = _place(builder, total, group, 4)
    store(load(builder, FLOAT, place) + _int8_values(builder, codes, scale, group), place)
