"""int8: blocks of 128 consecutive elements, each with a float32 scale, uniform codes from -127 to 127."""

from __future__ import annotations

from typing import Any

from squinchcomm.kernels.arguments import element_count
from squinchcomm.kernels.dtypes import FLOAT32
from squinchcomm.kernels.kernel_codec import KernelCodec
from squinchcomm.kernels.kinds import INT8

BLOCK_VALUES = 128
# Below this 127 / maximum overflows: such blocks become zeros.
SMALLEST_MAXIMUM = 2.0**-118
# With a larger one code 127 would decode to infinity.
LARGEST_SCALE = float.fromhex("0x1.020406p+121")


class Int8(KernelCodec):
    """All scales, then all codes; a last short block has its own scale and no padding."""

    name = "int8"
    wire_id = 2
    wire_version = 1
    bits_per_element = 8.25
    tile_size = 512
    rounding = "nearest"
    nonfinite_rule = "A block of 128 with a NaN or infinity decodes to NaN throughout."
    error_bound = "|error| <= 0.394 % (1/254) of the largest magnitude of its block of 128, plus 2^-118 for blocks below that."
    encoded_kind = INT8

    def encoded_nbytes(self, count: int, dtype: Any = FLOAT32) -> int:
        return -(-element_count(count) // BLOCK_VALUES) * 4 + count
