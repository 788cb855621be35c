"""Users' arrays, NumPy or torch, as flat contiguous NumPy views, and back."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from squinchcomm.collectives.wire import DTYPE_CODES
from squinchcomm.kernels.dtypes import BFLOAT16, canonical_dtype


class Flat:
    """A 1-D contiguous view of a user's array, or a copy of it when the array is not contiguous.

    Attributes:
        data: 1-D NumPy array; bfloat16 as `BFLOAT16`.
        shape: The user's shape.
    """

    __slots__ = ("_target", "data", "shape")

    def __init__(self, data: np.ndarray, shape: tuple[int, ...], target: Any = None) -> None:
        self.data = data
        self.shape = shape
        self._target = target

    def write_back(self) -> None:
        """Copies the result into a non-contiguous array; nothing to do for others."""
        target = self._target
        if target is None:
            return
        if isinstance(target, np.ndarray):
            target[...] = self.data.view(target.dtype).reshape(self.shape)
        else:
            torch = sys.modules["torch"]
            source = self.data.view(np.int16) if self.data.dtype == BFLOAT16 else self.data
            target.copy_(torch.from_numpy(source).view(target.dtype).view(self.shape))


def flatten(array: Any, name: str, *, writable: bool) -> Flat:
    """Views `array` as flat memory.

    Raises:
        TypeError: not a NumPy array or torch CPU tensor, or an element type that cannot be sent.
        ValueError: `writable` is asked of a read-only array.
    """
    if isinstance(array, np.ndarray):
        return _flatten_numpy(array, name, writable)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _flatten_torch(torch, array, name, writable)
    raise TypeError(f"{name} must be a NumPy array or a torch tensor, not {type(array).__name__}")


def _flatten_numpy(array: np.ndarray, name: str, writable: bool) -> Flat:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; pass {name}.filled(...) or {name}.data")
    array = array.view(np.ndarray)
    dtype = array.dtype if array.dtype in DTYPE_CODES else canonical_dtype(array.dtype)
    if dtype not in DTYPE_CODES:
        raise TypeError(
            f"{name} has dtype {array.dtype}, which cannot be sent; use a native bool, integer, float or complex type"
        )
    if writable and not array.flags.writeable:
        raise ValueError(f"{name} is read-only, but the result is written into it; pass a writable array")
    if writable and array.size and any(stride == 0 < size - 1 for stride, size in zip(array.strides, array.shape, strict=True)):
        raise ValueError(
            f"{name} repeats one element in several places, so no result can be written into it; pass a full array"
        )
    if array.flags.c_contiguous:
        return Flat(array.view(dtype).reshape(-1) if array.ndim else array.reshape(1).view(dtype), array.shape)
    return Flat(np.ascontiguousarray(array).view(dtype).reshape(-1), array.shape, array if writable else None)


class _Memory:
    """The memory of a contiguous 1-D tensor. `Tensor.numpy` would forbid to resize the tensor's storage, for ever; FSDP resizes them."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, tensor: Any) -> None:
        self._owner = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "version": 3,
        }


@functools.cache
def _torch_dtypes() -> dict[Any, np.dtype]:
    """NumPy's type for each of torch's that can be sent."""
    torch = sys.modules["torch"]
    found = {getattr(torch, dtype.name): dtype for dtype in DTYPE_CODES if dtype != BFLOAT16}
    return {**found, torch.bfloat16: BFLOAT16}


def _flatten_torch(torch: Any, tensor: Any, name: str, writable: bool) -> Flat:
    if tensor.device.type != "cpu":
        raise TypeError(f"{name} is on device {tensor.device}; only CPU tensors are supported here, pass {name}.cpu()")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"{name} is a {type(tensor).__name__}, which has no memory of its own; pass the tensor inside it")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; pass a dense tensor")
    if (
        writable
        and tensor.numel()
        and any(stride == 0 < size - 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    ):
        raise ValueError(f"{name} is expanded, so no result can be written into it; pass {name}.contiguous()")
    tensor = tensor.detach()
    flat = tensor.resolve_conj().resolve_neg().contiguous()
    copied = flat.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg()
    flat = flat.view(-1)
    dtype = _torch_dtypes().get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"{name} has dtype {tensor.dtype}, which cannot be sent")
    data = np.asarray(_Memory(flat)).view(dtype)
    return Flat(data, tuple(tensor.shape), tensor if copied and writable else None)
