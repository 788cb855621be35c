"""Checks of what callers hand to a codec, before any memory is touched."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from squinchcomm.errors import WireFormatError
from squinchcomm.kernels.dtypes import FLOAT32, FLOAT_DTYPES, canonical_dtype, dtype_name


@functools.lru_cache(maxsize=256)
def float_dtype(dtype: Any, name: str) -> np.dtype:
    """The canonical dtype; TypeError if codecs do not take it."""
    canonical = canonical_dtype(dtype)
    if canonical not in FLOAT_DTYPES:
        allowed = ", ".join(dtype_name(each) for each in FLOAT_DTYPES)
        raise TypeError(f"{name} has dtype {dtype_name(canonical)}; codecs take {allowed}")
    return canonical


def float_array(array: Any, name: str, *, size: int | None = None, writable: bool = False, dtype: Any = None) -> np.ndarray:
    """`array` itself, if it is a contiguous 1-D float array of that size and dtype (any supported one if None)."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
    found = float_dtype(array.dtype, name)
    if dtype is not None and found != dtype:
        raise TypeError(f"{name} has dtype {dtype_name(found)}; it must be {dtype_name(dtype)}")
    _check_layout(array, name, writable)
    if size is not None and array.size != size:
        raise ValueError(f"{name} has {array.size} elements; {size} are needed")
    return array


def residual_array(array: np.ndarray | None, size: int) -> np.ndarray | None:
    """The residual as float32 of `size` elements, or None."""
    return None if array is None else float_array(array, "residual", size=size, writable=True, dtype=FLOAT32)


def byte_output(array: np.ndarray | None, nbytes: int) -> np.ndarray:
    """A uint8 array of exactly `nbytes` to write into; a new one if `array` is None."""
    if array is None:
        return np.empty(nbytes, np.uint8)
    if not isinstance(array, np.ndarray):
        raise TypeError(f"out must be a NumPy array, not {type(array).__name__}")
    if array.dtype != np.uint8:
        raise TypeError(f"out has dtype {array.dtype}; encoded bytes are uint8")
    _check_layout(array, "out", True)
    if array.size != nbytes:
        raise ValueError(f"out has {array.size} bytes; {nbytes} are needed")
    return array


def byte_input(source: Any, nbytes: int, name: str) -> np.ndarray:
    """Bytes-like `source` as a uint8 array without copying; WireFormatError if there are not exactly `nbytes`."""
    array = as_bytes(source, name)
    if array.size != nbytes:
        raise WireFormatError(f"{name} has {array.size} encoded bytes; the element count asks for {nbytes}")
    return array


def data_address(array: np.ndarray) -> int:
    """Where the first element lies: 0.3 us where `array.ctypes.data` takes 1.2, and a call needs several."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):  # read-only, empty, or of a dtype that the buffer protocol does not know
        return int(array.__array_interface__["data"][0])


def as_bytes(source: Any, name: str) -> np.ndarray:
    """Any contiguous bytes-like object or uint8 array as a 1-D uint8 array over the same memory."""
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8:
            raise TypeError(f"{name} has dtype {source.dtype}; encoded bytes are uint8")
        _check_layout(source, name, False)
        return source
    try:
        view = memoryview(source)
    except TypeError:
        raise TypeError(f"{name} must be bytes-like or a uint8 array, not {type(source).__name__}") from None
    if not view.c_contiguous:
        raise ValueError(f"{name} is not contiguous")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def element_count(count: int) -> int:
    """A count that is an integer and not negative."""
    if not isinstance(count, (int, np.integer)) or isinstance(count, bool):
        raise TypeError(f"count must be an integer, not {type(count).__name__}")
    if count < 0:
        raise ValueError(f"count is {count}; it cannot be negative")
    return int(count)


def _check_layout(array: np.ndarray, name: str, writable: bool) -> None:
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; codecs take one dimension (use reshape(-1))")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous; copy it first (np.ascontiguousarray)")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name} is read-only")
