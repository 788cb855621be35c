"""torch tensors as the communicator takes them: in host memory, of an element type that it knows.

CPU tensors are used where they are. A CUDA tensor is copied to pinned host memory on a side stream, after the work that its
current stream holds, and back; the caller waits for the first copy, the thread that ends the call for the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

Step = Callable[[], None]

_NATIVE = {
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a view of it with integers in place of an element type (float8, complex32) that is only ever moved."""
    if tensor.dtype in _NATIVE:
        return tensor
    if tensor.is_quantized or tensor.layout != torch.strided or tensor.element_size() not in _SAME_SIZE:
        raise TypeError(f"squinch cannot send a tensor of {tensor.dtype}, layout {tensor.layout}")
    return tensor.detach().view(_SAME_SIZE[tensor.element_size()])


def to_send(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory with the elements of `tensor`."""
    return tensor if tensor.is_cpu else _copy_to_host(tensor)


def to_fill(tensor: torch.Tensor) -> tuple[torch.Tensor, Step | None]:
    """Host memory for a result, and what brings it to `tensor` afterwards, if that is another place."""
    if tensor.is_cpu:
        return tensor, None
    _catch_up(tensor.device)
    return _landing(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True), tensor)


def in_place(tensor: torch.Tensor) -> tuple[torch.Tensor, Step | None]:
    """Host memory with the elements of `tensor`, for a result that takes their place, and what brings it there."""
    return (tensor, None) if tensor.is_cpu else _landing(_copy_to_host(tensor), tensor)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of all tensors, of one type, one after the other, in new memory."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def spread(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copies `flat`, as `joined` makes it, into the tensors."""
    with _beside(flat.device):
        for part, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))


def room_for(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Uninitialised memory for the elements of all tensors, one after the other."""
    return torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device=tensors[0].device)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _catch_up(device: torch.device) -> None:
    """Lets the side stream wait for the work that the current stream holds by now."""
    if device.type != "cuda":
        raise TypeError(f"squinch takes CPU and CUDA tensors, not one on {device}")
    _side_stream(device).wait_stream(torch.cuda.current_stream(device))


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Runs the block on the side stream of a CUDA device, to its end; as it is for the CPU."""
    if device.type == "cpu":
        yield
        return
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    _catch_up(tensor.device)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with _beside(tensor.device):
        host.copy_(tensor.detach(), non_blocking=True)
    return host


def _landing(host: torch.Tensor, tensor: torch.Tensor) -> tuple[torch.Tensor, Step]:
    def land() -> None:
        with _beside(tensor.device):
            tensor.detach().copy_(host, non_blocking=True)

    return host, land
