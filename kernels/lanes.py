"""Sixteen lanes of floats or bits as LLVM vectors: what the Numba kernels are written in.

Auto-vectorisers give up on these kernels for reasons that change with every compiler release, so the vectors are explicit. A `Lanes`
value emits LLVM IR through Python operators while Numba lowers an intrinsic; LLVM then legalises sixteen lanes to the vector
registers of the machine (one AVX-512 register, two of AVX2, four of NEON).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WIDTH = 16
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()


class Lanes:
    """A vector of `WIDTH` elements under construction; integers are unsigned unless a method says otherwise."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder = builder
        self.value = value

    @property
    def element(self) -> Any:
        return self.value.type.element

    def _wrap(self, value: Any) -> Lanes:
        return Lanes(self.builder, value)

    def _operand(self, other: Any) -> Any:
        return other.value if isinstance(other, Lanes) else constant(self.builder, self.element, other).value

    def _is_float(self) -> bool:
        return isinstance(self.element, (ir.HalfType, ir.FloatType, ir.DoubleType))

    def __add__(self, other: Any) -> Lanes:
        emit = self.builder.fadd if self._is_float() else self.builder.add
        return self._wrap(emit(self.value, self._operand(other)))

    def __sub__(self, other: Any) -> Lanes:
        emit = self.builder.fsub if self._is_float() else self.builder.sub
        return self._wrap(emit(self.value, self._operand(other)))

    def __mul__(self, other: Any) -> Lanes:
        emit = self.builder.fmul if self._is_float() else self.builder.mul
        return self._wrap(emit(self.value, self._operand(other)))

    def __truediv__(self, other: Any) -> Lanes:
        return self._wrap(self.builder.fdiv(self.value, self._operand(other)))

    def __and__(self, other: Any) -> Lanes:
        return self._wrap(self.builder.and_(self.value, self._operand(other)))

    def __or__(self, other: Any) -> Lanes:
        return self._wrap(self.builder.or_(self.value, self._operand(other)))

    def __xor__(self, other: Any) -> Lanes:
        return self._wrap(self.builder.xor(self.value, self._operand(other)))

    def __lshift__(self, count: Any) -> Lanes:
        return self._wrap(self.builder.shl(self.value, self._operand(count)))

    def __rshift__(self, count: Any) -> Lanes:
        return self._wrap(self.builder.lshr(self.value, self._operand(count)))

    def compare(self, operator: str, other: Any) -> Lanes:
        """A vector of one-bit truths; float comparisons with NaN are false."""
        emit = self.builder.fcmp_ordered if self._is_float() else self.builder.icmp_unsigned
        return self._wrap(emit(operator, self.value, self._operand(other)))

    def choose(self, yes: Any, no: Any) -> Lanes:
        """`yes` where this truth holds, `no` elsewhere; one of them is a Lanes."""
        model = yes if isinstance(yes, Lanes) else no
        return model._wrap(self.builder.select(self.value, model._operand(yes), model._operand(no)))

    def maximum(self, other: Any) -> Lanes:
        return self.compare(">", other).choose(self, other)

    def minimum(self, other: Any) -> Lanes:
        return self.compare("<", other).choose(self, other)

    def bits(self) -> Lanes:
        """The same bits as integers."""
        size = {HALF: I16, FLOAT: I32, DOUBLE: I64}[self.element]
        return self._wrap(self.builder.bitcast(self.value, vector(size)))

    def as_float(self) -> Lanes:
        """The same bits as floats."""
        size = {16: HALF, 32: FLOAT, 64: DOUBLE}[self.element.width]
        return self._wrap(self.builder.bitcast(self.value, vector(size)))

    def to(self, element: Any) -> Lanes:
        """Converted by value: floats round to nearest even, integers are zero-extended or cut."""
        builder, kind = self.builder, vector(element)
        if self._is_float():
            wider = [HALF, FLOAT, DOUBLE].index(element) > [HALF, FLOAT, DOUBLE].index(self.element)
            emit = builder.fpext if wider else builder.fptrunc
        else:
            emit = builder.zext if element.width > self.element.width else builder.trunc
        return self._wrap(emit(self.value, kind))

    def int_to_float(self) -> Lanes:
        """Signed integers to float32, by value."""
        return self._wrap(self.builder.sitofp(self.value, vector(FLOAT)))

    def float_to_int(self) -> Lanes:
        """Float32 to signed 32-bit integers, cut towards zero; anything for values out of range."""
        return self._wrap(self.builder.fptosi(self.value, vector(I32)))

    def call(self, name: str, *operands: Any) -> Lanes:
        """An LLVM intrinsic such as "llvm.fmuladd" whose operands and result have this type."""
        values = [self.value, *(self._operand(operand) for operand in operands)]
        mangled = f"{name}.v{WIDTH}{'f' if self._is_float() else 'i'}{bit_width(self.element)}"
        signature = ir.FunctionType(self.value.type, [self.value.type] * len(values))
        return self._wrap(self.builder.call(cgutils.get_or_insert_function(self.builder.module, signature, mangled), values))

    def multiply_add(self, factor: Any, term: Any) -> Lanes:
        """`self * factor + term`, fused or not as the machine likes: use it only where the product is exact."""
        return self.call("llvm.fmuladd", factor, term)

    def reduce(self, operation: str) -> Any:
        """The "umax" or "umin" of the integers, as a scalar IR value."""
        name = f"llvm.vector.reduce.{operation}.v{WIDTH}i{self.element.width}"
        signature = ir.FunctionType(self.element, [self.value.type])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, signature, name), [self.value])


def vector(element: Any) -> Any:
    """The LLVM type of `WIDTH` elements."""
    return ir.VectorType(element, WIDTH)


def bit_width(element: Any) -> int:
    """Bits of one element."""
    return element.width if isinstance(element, ir.IntType) else {HALF: 16, FLOAT: 32, DOUBLE: 64}[element]


def constant(builder: Any, element: Any, value: Any) -> Lanes:
    """The same number in every lane."""
    number = int(value) if isinstance(element, ir.IntType) else float(value)
    return Lanes(builder, ir.Constant(vector(element), [number] * WIDTH))


def broadcast(builder: Any, scalar: Any) -> Lanes:
    """A scalar IR value in every lane."""
    kind = vector(scalar.type)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return Lanes(builder, builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(vector(I32), [0] * WIDTH)))


def address(builder: Any, base: Any, nbytes: Any) -> Any:
    """`base + nbytes`."""
    offset = I64(nbytes) if isinstance(nbytes, int) else nbytes
    return builder.gep(base, [offset], inbounds=True)


def load(builder: Any, element: Any, base: Any, nbytes: Any = 0) -> Lanes:
    """Sixteen neighbours from memory of any alignment."""
    pointer = builder.bitcast(address(builder, base, nbytes), vector(element).as_pointer())
    return Lanes(builder, builder.load(pointer, align=1))


def store(lanes: Lanes, base: Any, nbytes: Any = 0, *, streaming: bool = False) -> None:
    """Sixteen neighbours to memory: of any alignment, or with `streaming` past the caches to a multiple of 16 bytes."""
    builder = lanes.builder
    pointer = builder.bitcast(address(builder, base, nbytes), lanes.value.type.as_pointer())
    instruction = builder.store(lanes.value, pointer, align=16 if streaming else 1)
    if streaming:
        instruction.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))


PREFETCH_BYTES = 4096


def load_ahead(builder: Any, element: Any, base: Any, nbytes: Any = 0) -> Lanes:
    """`load`, and `prefetch` of the line that lies `PREFETCH_BYTES` further on."""
    place = address(builder, base, nbytes)
    prefetch(builder, place, PREFETCH_BYTES)
    return load(builder, element, place)


def prefetch(builder: Any, base: Any, nbytes: int, *, write: bool = False) -> None:
    """Asks for the cache line at `base + nbytes`.

    Tiles are read in strides, which is no pattern that hardware prefetchers follow, and they stop at every 4 KiB page. Beyond
    the end of an array a prefetch is harmless, but its address must not be declared in bounds.
    """
    signature = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [builder.gep(base, [I64(nbytes)]), I32(int(write)), I32(3), I32(1)])


def emitter(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a Numba intrinsic from `emit(builder, *argument values)`, with fixed types; no result if `emit` returns None.

    The builder has an attribute `features`: the names of the target's vector extensions.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, _, features = context.codegen().magic_tuple()
            builder.features = {name[1:] for name in features.split(",") if name.startswith("+")}
            value = emit(builder, *args)
            return context.get_dummy_value() if value is None else value

        def typing(context: Any, *given: Any) -> Any:
            return signature, codegen

        # Numba reads the parameters from the signature; a plain *given would reach the code generator as one tuple.
        names = ["context", *(f"argument{i}" for i in range(len(arguments)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = result(*arguments)
        typing.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        typing.__name__ = emit.__name__
        return intrinsic(typing)

    return decorate


@emitter(types.voidptr, types.voidptr, types.int64)
def advance(builder: Any, base: Any, nbytes: Any) -> Any:
    """`base + nbytes` in a kernel."""
    return address(builder, base, nbytes)


@emitter(types.void, types.voidptr, types.voidptr, types.int64)
def copy_bytes(builder: Any, target: Any, source: Any, nbytes: Any) -> None:
    """Copies `nbytes` between places that do not overlap."""
    cgutils.raw_memcpy(builder, target, source, nbytes, 1)


@emitter(types.void, types.voidptr, types.int64)
def clear_bytes(builder: Any, target: Any, nbytes: Any) -> None:
    """Sets `nbytes` to zero."""
    cgutils.memset(builder, target, nbytes, 0)


def _scalar_load(numba_type: Any, llvm_type: Any, name: str) -> Any:
    def emit(builder: Any, base: Any, index: Any) -> Any:
        typed = builder.bitcast(base, llvm_type.as_pointer())
        return builder.load(builder.gep(typed, [index], inbounds=True), align=1)

    emit.__name__ = f"load_{name}"
    return emitter(numba_type, types.voidptr, types.int64)(emit)


def _scalar_store(numba_type: Any, llvm_type: Any, name: str) -> Any:
    def emit(builder: Any, base: Any, index: Any, value: Any) -> None:
        typed = builder.bitcast(base, llvm_type.as_pointer())
        builder.store(value, builder.gep(typed, [index], inbounds=True), align=1)

    emit.__name__ = f"store_{name}"
    return emitter(types.void, types.voidptr, types.int64, numba_type)(emit)


load_u8, store_u8 = _scalar_load(types.uint8, I8, "u8"), _scalar_store(types.uint8, I8, "u8")
load_u32, store_u32 = _scalar_load(types.uint32, I32, "u32"), _scalar_store(types.uint32, I32, "u32")
load_f32, store_f32 = _scalar_load(types.float32, FLOAT, "f32"), _scalar_store(types.float32, FLOAT, "f32")
load_i64, load_f64 = _scalar_load(types.int64, I64, "i64"), _scalar_load(types.float64, DOUBLE, "f64")
load_pointer = _scalar_load(types.voidptr, I8.as_pointer(), "pointer")


def stack_buffer(nbytes: int) -> Any:
    """An intrinsic without arguments: `nbytes` of the kernel's stack, aligned to 64."""

    def emit(builder: Any) -> Any:
        space = cgutils.alloca_once(builder, ir.ArrayType(I8, nbytes))
        space.align = 64
        return builder.bitcast(space, I8.as_pointer())

    return emitter(types.voidptr)(emit)
