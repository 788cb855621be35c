"""Element types that codecs read and write, bfloat16 included, which NumPy does not have.

A bfloat16 array is any array whose elements are the upper 16 bits of a float32: one with dtype `BFLOAT16` below, or one
with ml_dtypes' `bfloat16`. Both are 2-byte views of the same memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# A structured dtype: NumPy arithmetic on it fails instead of giving integer nonsense.
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
FLOAT16 = np.dtype(np.float16)
FLOAT_DTYPES = (FLOAT32, FLOAT64, FLOAT16, BFLOAT16)


def canonical_dtype(dtype: Any) -> np.dtype:
    """The dtype as codecs know it; ml_dtypes' bfloat16 and the string "bfloat16" become `BFLOAT16`."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        return BFLOAT16
    dtype = np.dtype(dtype)
    return BFLOAT16 if dtype.name == "bfloat16" else dtype


def dtype_name(dtype: np.dtype) -> str:
    """Name for messages and tables, such as "float32" or "bfloat16"."""
    return "bfloat16" if dtype == BFLOAT16 else dtype.name


def to_float32(array: np.ndarray) -> np.ndarray:
    """Elements rounded once to float32 (exact for float16 and bfloat16). Shape is kept; float32 input is not copied."""
    dtype = canonical_dtype(array.dtype)
    if dtype == BFLOAT16:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float32, copy=False)


def from_float32(values: np.ndarray, dtype: Any) -> np.ndarray:
    """float32 `values` rounded to nearest, ties to even, to `dtype`; a NaN stays a NaN."""
    dtype = canonical_dtype(dtype)
    if dtype != BFLOAT16:
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(dtype, copy=False)
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    quiet_nan = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16).view(BFLOAT16)
