"""The codec contract: how an array of floats becomes a fixed number of bytes and comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from squinchcomm.kernels.dtypes import FLOAT32


class Codec(ABC):
    """Encodes 1-D float arrays into bytes whose number depends on the element count alone.

    Rules that hold for every codec:

    - Inputs are contiguous 1-D arrays of float32, float64, float16 or bfloat16 (`kernels.dtypes.BFLOAT16` or ml_dtypes); any count,
      zero included. Anything else raises TypeError or ValueError naming the argument.
    - The encoded bytes are self-contained: `decode` needs them and the count, nothing else.
    - `out` arguments are filled in place and returned; encoded buffers are contiguous uint8 arrays (inputs may be any
      bytes-like object), 1-D, of exactly `encoded_nbytes(count)` bytes, with no alignment demanded.
    - Arithmetic is float32 with one rounding an operation, in a stated order: all implementations give the same bytes.
    - What is written overlaps nothing that is read, except that `reduce` takes its `out` as an input too.
    - No temporary of the input's size; kernels release the GIL; calls from several threads at once are safe.
    - A non-finite element never decodes to a finite one.
    - Bytes that no encoder writes raise WireFormatError or decode to something: never a crash, never a read out of bounds.
    """

    name: ClassVar[str]
    wire_id: ClassVar[int]  # 1 byte in the frame header; 0..63 are ours, 64..255 third parties'
    wire_version: ClassVar[int]  # changes when the meaning of the bytes does; old versions are decoded for ever
    bits_per_element: ClassVar[float]  # above 0, at most 64
    tile_size: ClassVar[int]  # elements, 1 to 2^20; encoding pieces that are multiples of it wastes no padding
    rounding: ClassVar[Literal["exact", "nearest", "stochastic"]]
    lossless: ClassVar[bool] = False
    nonfinite_rule: ClassVar[str]  # one sentence for docs and `doctor`
    error_bound: ClassVar[str]  # one sentence, per element

    @abstractmethod
    def encoded_nbytes(self, count: int, dtype: Any = FLOAT32) -> int:
        """Bytes that `count` elements take. Only the codec `none` looks at the dtype."""

    @abstractmethod
    def encode(
        self,
        src: np.ndarray,
        out: np.ndarray | None = None,
        *,
        scale: float = 1.0,
        residual: np.ndarray | None = None,
        seed: int | None = None,
    ) -> np.ndarray:
        """Encodes `float32(src) * float32(scale) + residual`.

        Args:
            src: `count` elements, read only.
            out: Where the bytes go, uint8, `encoded_nbytes(count)` long; allocated if None.
            scale: Multiplied in float32 before anything else.
            residual: float32, `count` elements, for error feedback: added after scaling, then overwritten with
                what this encoding lost (value minus decoded value; 0 where either is not finite).
            seed: 64-bit key of the random numbers. Stochastic codecs demand it; others ignore it.

        Returns:
            `out`.
        """

    @abstractmethod
    def decode(self, src: Any, count: int, out: np.ndarray | None = None, dtype: Any = FLOAT32) -> np.ndarray:
        """Decodes `count` elements into `out` (or a new array of `dtype`), rounded once from float32 to its dtype."""

    @abstractmethod
    def decode_add(self, src: Any, acc: np.ndarray) -> None:
        """Adds the decoded elements to `acc`, float32, 1-D, whose size is the count."""

    @abstractmethod
    def reduce(self, inputs: Sequence[Any], out: np.ndarray, *, scale: float = 1.0) -> np.ndarray:
        """Sums encoded and plain inputs in the order given, in float32, then multiplies by `scale`.

        Where a sum may be too large for float32 a codec may divide the summands by a power of two first, so that its multiple is finite.

        Args:
            inputs: At least one. A float array of `out.size` elements is taken as it is (rounded to float32); a bytes-like
                object or uint8 array is decoded. `out` itself may be among them.
            out: Float array of any supported dtype, rounded once at the end.
        """

    @abstractmethod
    def reduce_encode(
        self, inputs: Sequence[Any], count: int, out: np.ndarray | None = None, *, scale: float = 1.0, seed: int | None = None
    ) -> np.ndarray:
        """`encode(sum of inputs, scale=scale, seed=seed)` in one pass, with no float array of the sum in memory."""
