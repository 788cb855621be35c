"""bf16: the upper half of each float32, rounded to nearest even."""

from __future__ import annotations

from typing import Any

from squinchcomm.kernels.arguments import element_count
from squinchcomm.kernels.dtypes import FLOAT32
from squinchcomm.kernels.kernel_codec import KernelCodec
from squinchcomm.kernels.kinds import BF16


class BFloat16(KernelCodec):
    """Two little-endian bytes an element."""

    name = "bf16"
    wire_id = 1
    wire_version = 1
    bits_per_element = 16.0
    tile_size = 512
    rounding = "nearest"
    nonfinite_rule = "NaN and infinities are kept; magnitudes above 3.3961e38 become infinite."
    error_bound = "|error| <= 2^-8 |x| (0.39 %), or 2^-134 for subnormals."
    encoded_kind = BF16

    def encoded_nbytes(self, count: int, dtype: Any = FLOAT32) -> int:
        return 2 * element_count(count)
