"""Compressed gradients, and on request parameters, for FSDP2 (`torch.distributed.fsdp.fully_shard`), over any backend.

FSDP2 lets a module's reduce-scatter and all-gather be replaced. The reduce-scatter here sends each rank its shard encoded, by
all-to-all of bytes; the owner adds the decoded shards and its own exact one in rank order in float32. A value is quantised once.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from squinchcomm.arrays import flatten
from squinchcomm.collectives.coder import mix
from squinchcomm.errors import ConfigError
from squinchcomm.kernels import get_codec, warm_up
from squinchcomm.kernels.codec import Codec
from squinchcomm.policy import choose_codec
from squinchcomm.torch.encoded_sum import EncodedSum
from squinchcomm.torch.exchange import SlotPool, exchange, wire_device
from squinchcomm.torch.guards import lossless
from squinchcomm.torch.reductions import reduction
from squinchcomm.torch.tensors import in_place, to_fill, to_send

log = logging.getLogger("squinchcomm")


def compress_fsdp(
    model: torch.nn.Module,
    codec: str = "squinch6",
    *,
    all_gather_codec: str | None = None,
    min_compress_bytes: int = 64 << 10,
    seed: int = 0,
) -> None:
    """Compresses the gradients of every `fully_shard`-ed module in `model`, on all ranks of its mesh alike.

    Sums, averages and divide factors are FSDP2's own, in its `reduce_dtype`. Modules whose gradients are smaller than
    `min_compress_bytes` are reduced losslessly. On a 2-D mesh (HSDP) the all-reduce between replicas, which comes after the
    reduce-scatter inside a sharding group, is compressed as well.

    Args:
        model: A model to which `fully_shard` has been applied.
        codec: Name of the codec for gradients.
        all_gather_codec: Name of a codec for parameters; None gathers them losslessly. All ranks compute with the
            decoded parameters; the optimizer's stay exact. Stochastic codecs are refused: the backward pass would
            gather other values than the forward pass.
        min_compress_bytes: Smaller messages are lossless.
        seed: Key of the random numbers of stochastic codecs.

    Raises:
        ConfigError: no module is fully_shard-ed, a codec is unknown, or a module's parameters lie on several meshes.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ConfigError(
            f"{type(model).__name__} has no fully_shard-ed module; call torch.distributed.fsdp.fully_shard on it first "
            "(for DistributedDataParallel use compress_hook; FSDP1 is not supported)"
        )
    settings = _Settings(min_compress_bytes, SlotPool())
    reduce_scatter = CompressedReduceScatter(get_codec(codec).name, settings, seed)
    all_gather = None if all_gather_codec is None else CompressedAllGather(all_gather_codec, settings)
    warm_up()
    for module in modules:
        try:
            module.set_custom_reduce_scatter(reduce_scatter)
            if all_gather is not None:
                module.set_custom_all_gather(all_gather)
        except ValueError as error:
            raise ConfigError(f"{type(module).__name__}: {error}") from error
        _compress_replicas(module, get_codec(codec).name, settings, seed)


def _compress_replicas(module: FSDPModule, codec: str, settings: _Settings, seed: int) -> None:
    """FSDP2 has no extension point for the all-reduce of HSDP, but a place for its group."""
    for parameters in module._get_fsdp_state()._fsdp_param_groups:
        mesh: Any = parameters.mesh_info
        group = getattr(mesh, "replicate_process_group", None)
        if group is not None:
            group = group.inner if isinstance(group, CompressedReplicas) else group
            mesh.replicate_process_group = CompressedReplicas(group, codec, settings, seed)


class _Settings:
    """What the modules of one model share."""

    def __init__(self, min_compress_bytes: int, pool: SlotPool) -> None:
        self.min_compress_bytes = min_compress_bytes
        self.pool = pool
        self._seen: set[tuple[str, torch.dtype, int]] = set()

    def choose(self, codec: str, tensor: torch.Tensor, call: str, group: dist.ProcessGroup) -> Codec:
        """The codec for a call that moves `tensor`; one log line the first time that such a call is compressed."""
        dtype = flatten(torch.empty(0, dtype=tensor.dtype), call, writable=False).data.dtype
        chosen, _ = choose_codec(
            codec, codec, dtype=dtype, nbytes=tensor.nbytes, reduction="sum", min_compress_bytes=self.min_compress_bytes
        )
        signature = call, tensor.dtype, tensor.numel()
        if not chosen.lossless and signature not in self._seen:
            self._seen.add(signature)
            log.info("FSDP2: %s of %d %s over %d ranks compressed with %s", *signature[:1], tensor.numel(), tensor.dtype,
                     group.size(), chosen.name)  # fmt: skip
        return chosen


class CompressedReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter with encoded contributions."""

    def __init__(self, codec: str, settings: _Settings, seed: int) -> None:
        self.codec = codec
        self._settings = settings
        self._seed = seed
        self._calls = 0
        self._plain = DefaultReduceScatter()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for FSDP2 to fill."""
        return self._plain.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """`output_tensor` becomes this rank's shard of the reduction of `input_tensor`, which is only read."""
        codec = self._settings.choose(self.codec, input_tensor, "reduce_scatter", group)
        if codec.lossless or group.size() == 1:
            with lossless():
                return self._plain(output_tensor, input_tensor, group, op, async_op)
        scale = _scale_of(op, group.size())
        source = flatten(to_send(input_tensor), "input", writable=False).data
        host, land = to_fill(output_tensor)
        result = flatten(host, "output", writable=True).data
        slots = self._settings.pool.take(group, codec.encoded_nbytes(result.size, source.dtype))
        try:
            self._encode(codec, source.reshape(group.size(), -1), slots, group.rank())
            arrived = exchange(slots, group)
        except BaseException:
            self._settings.pool.give(slots)
            raise
        own = source.reshape(group.size(), -1)[group.rank()]

        def finish(done: Any) -> None:
            try:
                done.value()
                inputs = [
                    own if peer == group.rank() else slots.incoming_from(peer, slots.slot_bytes) for peer in range(group.size())
                ]
                codec.reduce(inputs, result, scale=scale)
            finally:
                self._settings.pool.give(slots)
            if land is not None:
                land()

        finished = arrived.then(finish)
        if async_op:
            work: dist.Work = _create_work_from_future(finished)
            return work
        finished.wait()
        return None

    def _encode(self, codec: Codec, shards: np.ndarray, slots: Any, rank: int) -> None:
        self._calls += 1
        ranks = len(shards)
        for peer in slots.peers:
            seed = mix(self._seed, (self._calls * ranks + peer) * ranks + rank)
            codec.encode(shards[peer], slots.outgoing_to(peer, slots.slot_bytes), seed=seed)


class CompressedReplicas:
    """Stands for the group of a shard's replicas where FSDP2 calls `all_reduce` on it; for all else it is that group."""

    def __init__(self, inner: dist.ProcessGroup, codec: str, settings: _Settings, seed: int) -> None:
        self.inner = inner
        self.codec = codec
        self._settings = settings
        self._seed = seed
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Reduces the one tensor in `tensors`; returns when it is done."""
        [tensor] = tensors
        codec = self._settings.choose(self.codec, tensor, "all_reduce", self.inner)
        if codec.lossless or self.inner.size() == 1:
            with lossless():
                return self.inner.allreduce(tensors, opts)
        self._calls += 1
        host, land = in_place(tensor)
        values = flatten(host, "gradients", writable=True).data
        scale, seed = _scale_of(opts.reduceOp, self.inner.size()), mix(self._seed, self._calls)
        whole = EncodedSum(values, codec, self.inner, self._settings.pool, scale=scale, seed=seed)
        try:
            whole.encode()
            exchange(whole.slots, self.inner).wait()
            whole.combine()
            exchange(whole.slots, self.inner).wait()
            whole.decode()
        finally:
            whole.release()
        if land is not None:
            land()
        return None


class CompressedAllGather(AllGather):
    """FSDP2's all-gather of encoded parameters: every rank, the owner included, takes them from the same bytes."""

    def __init__(self, codec: str, settings: _Settings) -> None:
        chosen = get_codec(codec)
        if chosen.rounding == "stochastic":
            raise ConfigError(
                f"all_gather_codec {codec!r} rounds at random, so forward and backward would see different parameters; "
                "take one that rounds to nearest, such as bf16, int8 or squinch6"
            )
        self.codec = chosen.name
        self._settings = settings
        self._plain = DefaultAllGather()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for FSDP2 to fill."""
        return self._plain.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gathers `input_tensor`, which may be this rank's part of `output_tensor`."""
        if group.size() == 1 or not output_tensor.is_floating_point():
            # Parameters of several types come as bytes, which only travel as they are.
            return self._plain(output_tensor, input_tensor, group, async_op)
        codec = self._settings.choose(self.codec, output_tensor, "all_gather", group)
        if codec.lossless:
            return self._plain(output_tensor, input_tensor, group, async_op)
        source = flatten(to_send(input_tensor), "input", writable=False).data
        host, land = to_fill(output_tensor)
        parts = flatten(host, "output", writable=True).data.reshape(group.size(), -1)
        device = wire_device(group)
        encoded = torch.from_numpy(codec.encode(source)).to(device)
        gathered = [torch.empty_like(encoded) for _ in range(group.size())]
        work = dist.all_gather(gathered, encoded, group=group, async_op=True)

        def finish(done: Any) -> None:
            done.value()
            for part, payload in zip(parts, gathered, strict=True):
                codec.decode(payload.cpu().numpy(), part.size, part)
            if land is not None:
                land()

        finished = work.get_future().then(finish)
        if async_op:
            made: dist.Work = _create_work_from_future(finished)
            return made
        finished.wait()
        return None


def _scale_of(op: Any, ranks: int) -> float:
    """What the sum is multiplied by.

    Raises:
        ConfigError: `op` is not SUM, AVG or PREMUL_SUM by a number.
    """
    asked = reduction(op)
    if asked.name == "premul_sum" and isinstance(asked.factor, float):
        return asked.factor
    scales = {"sum": 1.0, "avg": 1.0 / ranks}
    if asked.name not in scales:
        raise ConfigError(f"gradients can be summed or averaged in compressed form; FSDP2 asks for {asked.name}")
    return scales[asked.name]
