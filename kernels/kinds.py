"""How elements lie in memory, as numbers that the kernel switches on."""

from __future__ import annotations

import functools

import numpy as np

from squinchcomm.kernels.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, canonical_dtype

F32, F64, F16, BF16, INT8, SQUINCH, SQUINCH_SR, NOTHING, F32_STREAMED = range(9)
_KINDS: dict[np.dtype, int] = {FLOAT32: F32, FLOAT64: F64, FLOAT16: F16, BFLOAT16: BF16}


@functools.lru_cache(maxsize=256)
def kind_of(dtype: np.dtype) -> int:
    """The kind of plain elements of one of the supported dtypes."""
    return _KINDS[canonical_dtype(dtype)]
