"""What the built-in codecs share: arguments checked, then one call of the compiled kernel."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from squinchcomm.kernels.arguments import (
    as_bytes,
    byte_input,
    byte_output,
    data_address,
    element_count,
    float_array,
    float_dtype,
    residual_array,
)
from squinchcomm.kernels.codec import Codec
from squinchcomm.kernels.compile import kernel
from squinchcomm.kernels.dtypes import FLOAT32, to_float32
from squinchcomm.kernels.kinds import F32, F32_STREAMED, NOTHING, kind_of
from squinchcomm.kernels.squinch6_tables import TABLES

# One summand as the kernel reads it: kind, address, factor (encoded inputs are multiplied by it after decoding).
Input = tuple[int, int, float]
INPUT_FORMAT = "qQd"
TASK_FORMAT = "qqdQqqQddQqQ"  # fields: see cpu.transform

# Outputs at least this large are written past the caches: they would not stay there, and a store that skips them does not
# read the line first.
STREAMED_BYTES = 32 << 20
_TABLES_ADDRESS = data_address(TABLES)
# Where sums grow: in scratch memory, in the output, or in an output that is also the first summand.
_THROUGH_SCRATCH, _IN_OUTPUT, _ONTO_OUTPUT = range(3)
_ADD_RESIDUAL, _UPDATE_RESIDUAL = 1, 2
MAGNITUDE_BITS = (1 << 32) - 1
_nonfinite_blocks: dict[str, int] = {}
_counting = threading.Lock()


class KernelCodec(Codec):
    """A codec whose bytes the compiled kernel reads and writes as one kind.

    The kernel tells how many of the blocks that it writes are not finite; codecs without blocks (bf16) have none.
    """

    encoded_kind: ClassVar[int]

    @property
    def nonfinite_blocks(self) -> int:
        """How many of the blocks that this process has encoded held a NaN or infinity."""
        return _nonfinite_blocks.get(self.name, 0)

    def encode(
        self,
        src: np.ndarray,
        out: np.ndarray | None = None,
        *,
        scale: float = 1.0,
        residual: np.ndarray | None = None,
        seed: int | None = None,
    ) -> np.ndarray:
        float_array(src, "src")
        residual_array(residual, src.size)
        out = byte_output(out, self.encoded_nbytes(src.size, src.dtype))
        self._encode_sum([_plain_input(src)], src.size, out, scale, residual, self._checked_seed(seed), src.dtype)
        return out

    def decode(self, src: Any, count: int, out: np.ndarray | None = None, dtype: Any = FLOAT32) -> np.ndarray:
        count = element_count(count)
        out = (
            np.empty(count, float_dtype(dtype, "dtype")) if out is None else float_array(out, "out", size=count, writable=True)
        )
        encoded = byte_input(src, self.encoded_nbytes(count, out.dtype), "src")
        self._sum([self._encoded_input(encoded, out.dtype)], out, 1.0)
        return out

    def decode_add(self, src: Any, acc: np.ndarray) -> None:
        float_array(acc, "acc", writable=True, dtype=FLOAT32)
        encoded = byte_input(src, self.encoded_nbytes(acc.size, FLOAT32), "src")
        self._sum([_plain_input(acc), self._encoded_input(encoded, FLOAT32)], acc, 1.0)

    def reduce(self, inputs: Sequence[Any], out: np.ndarray, *, scale: float = 1.0) -> np.ndarray:
        float_array(out, "out", writable=True)
        alive, descriptions = self._inputs(inputs, out.size, out.dtype)
        if power := self._headroom(descriptions):
            alive, descriptions = _divided(alive, descriptions, power)
        self._sum(descriptions, out, scale * power if power else scale)
        del alive
        return out

    def reduce_encode(
        self, inputs: Sequence[Any], count: int, out: np.ndarray | None = None, *, scale: float = 1.0, seed: int | None = None
    ) -> np.ndarray:
        count = element_count(count)
        out = byte_output(out, self.encoded_nbytes(count, FLOAT32))
        alive, descriptions = self._inputs(inputs, count, FLOAT32)
        if power := self._headroom(descriptions):
            alive, descriptions = _divided(alive, descriptions, power)
        seed = self._checked_seed(seed)
        self._encode_sum(descriptions, count, out, scale * power if power else scale, None, seed, FLOAT32)
        del alive
        return out

    def _encode_sum(
        self,
        inputs: list[Input],
        count: int,
        out: np.ndarray,
        scale: float,
        residual: np.ndarray | None,
        seed: int,
        dtype: np.dtype,
    ) -> None:
        """Fills `out` from inputs that stay alive until this returns."""
        self._note(call_kernel(inputs, count, self._kind(dtype), data_address(out), scale=scale, residual=residual, seed=seed))

    def _note(self, outcome: int) -> None:
        """Counts the non-finite blocks, which are rare, of what `call_kernel` returned."""
        if outcome > MAGNITUDE_BITS:
            with _counting:
                _nonfinite_blocks[self.name] = self.nonfinite_blocks + (outcome >> 32)

    def _kind(self, dtype: np.dtype) -> int:
        return self.encoded_kind

    def _encoded_input(self, encoded: np.ndarray, dtype: Any) -> Input:
        return self._kind(dtype), data_address(encoded), 1.0

    def _checked_seed(self, seed: int | None) -> int:
        return 0

    def _headroom(self, inputs: Sequence[Input]) -> float:
        """A power of two by which summands are divided, and the sum multiplied, where it might be too large for float32; or 0."""
        return 0.0

    def _inputs(self, inputs: Sequence[Any], count: int, dtype: Any) -> tuple[list[np.ndarray], list[Input]]:
        if len(inputs) == 0:
            raise ValueError("inputs is empty; a sum needs at least one")
        arrays, descriptions = [], []
        for i, each in enumerate(inputs):
            name = f"inputs[{i}]"
            if isinstance(each, np.ndarray) and each.dtype != np.uint8:
                arrays.append(float_array(each, name, size=count))
                descriptions.append(_plain_input(each))
            else:
                arrays.append(byte_input(as_bytes(each, name), self.encoded_nbytes(count, dtype), name))
                descriptions.append(self._encoded_input(arrays[-1], dtype))
        return arrays, descriptions

    @staticmethod
    def _sum(descriptions: list[Input], out: np.ndarray, scale: float) -> None:
        kind, place, direct = kind_of(out.dtype), data_address(out), _THROUGH_SCRATCH
        if kind == F32 and scale == 1:
            shared = [address == place for _, address, _ in descriptions]
            if not any(shared):
                direct = _IN_OUTPUT
            elif shared[0] and not any(shared[1:]):
                direct = _ONTO_OUTPUT
        if direct == _IN_OUTPUT and out.nbytes >= STREAMED_BYTES and place % 16 == 0:
            kind, direct = F32_STREAMED, _THROUGH_SCRATCH
        call_kernel(descriptions, out.size, kind, place, scale=scale, direct=direct)


def _divided(arrays: list[np.ndarray], inputs: list[Input], power: float) -> tuple[list[np.ndarray], list[Input]]:
    """The same summands, divided: encoded ones by their factor, others as copies."""
    alive, divided = [], []
    for array, (kind, address, factor) in zip(arrays, inputs, strict=True):
        if array.dtype == np.uint8:
            alive.append(array)
            divided.append((kind, address, factor / power))
        else:
            alive.append(to_float32(array) * np.float32(1 / power))
            divided.append(_plain_input(alive[-1]))
    return alive, divided


def _plain_input(array: np.ndarray) -> Input:
    return kind_of(array.dtype), data_address(array), 1.0


def call_kernel(
    inputs: list[Input],
    count: int,
    kind: int,
    place: int,
    *,
    scale: float = 1.0,
    residual: np.ndarray | None = None,
    factor: float = 1.0,
    seed: int = 0,
    direct: int = 0,
) -> int:
    """Sums `inputs` into `count` elements of `kind` at address `place`; with kind NOTHING only looks at the sum.

    Returns:
        As `cpu.transform`: float bits of the largest magnitude for kinds that look for it, and a count of non-finite blocks.
    """
    mode = 0 if residual is None else _ADD_RESIDUAL if kind == NOTHING else _UPDATE_RESIDUAL
    fields = (
        len(inputs),
        count,
        scale,
        0 if residual is None else data_address(residual),
        mode,
        kind,
        place,
        factor,
        1.0 / factor,
        seed,
        direct,
        _TABLES_ADDRESS,
    )
    return kernel()(struct.pack(TASK_FORMAT + INPUT_FORMAT * len(inputs), *fields, *chain.from_iterable(inputs)))


def _forget() -> None:
    """In a forked child: what was counted is the parent's."""
    global _counting
    _counting = threading.Lock()
    _nonfinite_blocks.clear()


os.register_at_fork(after_in_child=_forget)
