"""none: the bytes of the array itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from squinchcomm.kernels.arguments import byte_input, byte_output, element_count, float_array, float_dtype
from squinchcomm.kernels.dtypes import FLOAT32
from squinchcomm.kernels.kernel_codec import KernelCodec
from squinchcomm.kernels.kinds import F32, kind_of


class Raw(KernelCodec):
    """Little-endian elements of the source's dtype; `reduce` and `decode` read them as their output's dtype.

    `reduce_encode` reads and writes float32. With a scale or a residual the arithmetic is float32, as in every codec.
    """

    name = "none"
    wire_id = 0
    wire_version = 1
    bits_per_element = 32.0  # of float32
    tile_size = 512
    rounding = "exact"
    lossless = True
    nonfinite_rule = "Every bit is kept."
    error_bound = "0."
    encoded_kind = F32

    def encoded_nbytes(self, count: int, dtype: Any = FLOAT32) -> int:
        return element_count(count) * float_dtype(dtype, "dtype").itemsize

    def encode(
        self,
        src: np.ndarray,
        out: np.ndarray | None = None,
        *,
        scale: float = 1.0,
        residual: np.ndarray | None = None,
        seed: int | None = None,
    ) -> np.ndarray:
        if scale != 1 or residual is not None:
            return super().encode(src, out, scale=scale, residual=residual, seed=seed)
        float_array(src, "src")
        out = byte_output(out, src.nbytes)
        np.copyto(out, src.view(np.uint8))
        return out

    def decode(self, src: Any, count: int, out: np.ndarray | None = None, dtype: Any = FLOAT32) -> np.ndarray:
        count = element_count(count)
        out = (
            np.empty(count, float_dtype(dtype, "dtype")) if out is None else float_array(out, "out", size=count, writable=True)
        )
        np.copyto(out.view(np.uint8), byte_input(src, out.nbytes, "src"))
        return out

    def _kind(self, dtype: np.dtype) -> int:
        return kind_of(dtype)
