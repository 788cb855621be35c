"""How elements lie in memory, as numbers that the kernel switches on."""

from __future__ import annotations

import numpy as np

from squinchcomm.kernels.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

F32, F64, F16, BF16, INT8, SQUINCH, SQUINCH_SR, NOTHING, F32_STREAMED = range(9)
ITEM_BYTES = (4, 8, 2, 2)

KIND_OF_DTYPE: dict[np.dtype, int] = {FLOAT32: F32, FLOAT64: F64, FLOAT16: F16, BFLOAT16: BF16}
