"""Lossless reductions in rank order.

float16 and bfloat16 are accumulated in float32 and rounded once; other types in their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from squinchcomm.kernels.dtypes import BFLOAT16, FLOAT16, FLOAT32, dtype_name, from_float32, to_float32

_BLOCK = 16384  # elements: what one pass reads and writes stays in the first-level caches
_UFUNCS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "premul_sum": np.add,
}
_BITWISE = ("band", "bor", "bxor")


def check_reduction(op: str, dtype: np.dtype) -> None:
    """Raises ValueError for a reduction that does not exist or does not fit the element type.

    "premul_sum" is a sum whose contributions each rank has multiplied by its factor before the call.
    """
    if op not in _UFUNCS:
        raise ValueError(f"op must be one of {', '.join(_UFUNCS)}, not {op!r}")
    kind = "f" if dtype == BFLOAT16 else dtype.kind
    if (op == "avg" and kind not in "fc") or (op in ("min", "max") and kind == "c") or (op in _BITWISE and kind not in "biu"):
        raise ValueError(f"op {op!r} is not defined for {dtype_name(dtype)} arrays")


def reduce_arrays(inputs: Sequence[np.ndarray], out: np.ndarray, op: str, divisor: int) -> None:
    """Combines `inputs`, 1-D arrays of one size and dtype, in their order into `out`, which may be one of them.

    "avg" divides the sum by `divisor`; a mean that is finite comes out finite, also where the sum is too large for its type.
    """
    ufunc = _UFUNCS[op]
    half = out.dtype in (FLOAT16, BFLOAT16)
    scratch = np.empty(min(_BLOCK, out.size), FLOAT32 if half else out.dtype)
    overflow = _Overflow()
    with np.errstate(all="ignore", over="call", call=overflow):
        for start in range(0, out.size, _BLOCK):
            part = slice(start, min(start + _BLOCK, out.size))
            acc = scratch[: part.stop - part.start]
            overflow.seen = False
            first = to_float32(inputs[0][part]) if half else inputs[0][part]
            for other in inputs[1:]:
                ufunc(first, to_float32(other[part]) if half else other[part], out=acc)
                first = acc
            if op == "avg":
                first = np.divide(first, first.dtype.type(divisor), out=acc)
                if overflow.seen:
                    _mend_means(first, [to_float32(each[part]) if half else each[part] for each in inputs], divisor)
            out[part] = from_float32(first, out.dtype) if half else first


class _Overflow:
    """Told by NumPy, which reads the processor's flags after each operation anyway, that finite numbers gave an infinity."""

    def __init__(self) -> None:
        self.seen = False

    def __call__(self, kind: str, flags: int) -> None:
        self.seen = True


def _mend_means(means: np.ndarray, inputs: Sequence[np.ndarray], divisor: int) -> None:
    """Computes the elements of `means` that are not finite once more, from inputs divided by a power of two, which rounds nothing."""
    real = means.real.dtype
    power = 1 << (len(inputs) - 1).bit_length()
    flat = [each.view(real) * real.type(1 / power) for each in inputs]
    total = flat[0]
    for each in flat[1:]:
        total = total + each
    values = means.view(real)
    np.copyto(values, total / real.type(divisor / power), where=~np.isfinite(values))
