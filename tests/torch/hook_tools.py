"""What checks of gradient averaging on several ranks share: a model with known gradients, and their average by the NumPy codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from squinchcomm.arrays import flatten
from squinchcomm.collectives.plan import Plan
from squinchcomm.kernels import squinch6_reference as reference
from squinchcomm.kernels.dtypes import from_float32, to_float32
from squinchcomm.torch import CompressState, compress_hook

Tensors = list[torch.Tensor]


class Sum(torch.nn.Module):
    """Its loss is the scalar product of parameters and given vectors, so that gradients are exactly these vectors."""

    def __init__(self, sizes: list[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(size, dtype=dtype) for size in sizes)

    def forward(self, gradients: Tensors, used: list[int] | None = None) -> torch.Tensor:
        places = range(len(self.weights)) if used is None else used
        return torch.stack([(self.weights[i] * gradients[i]).sum() for i in places]).sum()


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def gradients_of(every_rank: int, sizes: list[int], dtype: torch.dtype = torch.float32, step: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(1000 * step + every_rank)
    return [(torch.randn(count, generator=generator) * 10.0 ** (i % 3 - 2)).to(dtype) for i, count in enumerate(sizes)]


def wrapped(sizes: list[int], dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Sum(sizes, dtype), **options)


def hooked(
    ddp: DistributedDataParallel, hook: Callable[..., Any] = compress_hook, **settings: Any
) -> tuple[DistributedDataParallel, CompressState]:
    state = CompressState(**{"min_compress_bytes": 0, **settings})
    ddp.register_comm_hook(state, hook)
    return ddp, state


def backward(ddp: DistributedDataParallel, gradients: Tensors, **forward: Any) -> Tensors:
    ddp.zero_grad()
    ddp(gradients, **forward).backward()
    return [weight.grad for weight in ddp.module.weights]


def plain(tensor: torch.Tensor) -> np.ndarray:
    return flatten(tensor.contiguous(), "tensor", writable=False).data


def expected(contributions: list[np.ndarray]) -> np.ndarray:
    """Average of one bucket by the NumPy reference codec: each rank's array in the buckets' own dtype."""
    ranks, dtype = len(contributions), contributions[0].dtype
    values = [to_float32(each) for each in contributions]
    bounds = Plan.even(values[0].size, ranks, dtype.itemsize, 512).bounds
    parts = []
    for owner in range(ranks):
        shard = slice(bounds[owner], bounds[owner + 1])
        count = shard.stop - shard.start
        total = None
        for each, value in enumerate(values):
            part = value[shard] if each == owner else reference.decode(reference.encode(value[shard]), count)
            total = part if total is None else total + part
        parts.append(reference.decode(reference.encode(total * np.float32(1 / ranks)), count))
    return from_float32(np.concatenate(parts), dtype)


def assert_same_on_all_ranks(tensors: Tensors) -> None:
    flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
    everyones = [torch.empty_like(flat) for _ in range(size())]
    dist.all_gather(everyones, flat)
    assert all(torch.equal(flat, other) for other in everyones)
