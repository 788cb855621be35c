"""The operations of a process group on tensors, over one communicator.

Each takes a `How`: whether to return at once, and its deadline. Work that a communicator does not do itself (lists of tensors, CUDA
memory, factors) happens before the call, in the caller's thread, and after it, as the last step of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from squinchcomm.communicator import Communicator
from squinchcomm.errors import SquinchError
from squinchcomm.kernels import get_codec
from squinchcomm.kernels.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from squinchcomm.policy import AUTO, misfit
from squinchcomm.torch.callbacks import CallbackThreads
from squinchcomm.torch.errors import GroupMismatch, translated
from squinchcomm.torch.guards import current_guard
from squinchcomm.torch.reductions import Reduction
from squinchcomm.torch.tensors import Step, in_place, joined, movable, room_for, spread, to_fill, to_send
from squinchcomm.torch.works import FinishedWork, GroupWork
from squinchcomm.work import Work

Tensor = torch.Tensor
_FLOATS: dict[torch.dtype, np.dtype] = {
    torch.float32: FLOAT32,
    torch.float64: FLOAT64,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
}
_OTHER = np.dtype(np.int64)


class How(NamedTuple):
    """How to make a call: return at once or not, and seconds until it fails."""

    async_op: bool
    timeout_s: float


Start = Callable[..., "Work | int | None"]


class Core:
    """What a process group does, whatever torch calls it."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._callbacks = CallbackThreads(lambda: comm.abort("this process ended without destroy_process_group"))

    def close(self) -> None:
        """Finishes pending calls and frees everything."""
        self.comm.close()
        self._callbacks.close()

    # --- reductions -------------------------------------------------------------------------------------------------

    def allreduce(self, tensor: Tensor, op: Reduction, how: How) -> dist.Work:
        """Combines `tensor` over all ranks in its place."""
        if tensor.layout != torch.strided:
            return self._sparse_allreduce(tensor, op, how)
        if op.factor is not None:
            tensor.detach().copy_(op.contribution(tensor))
        host, land = in_place(tensor)
        codec = self._reduction_codec(tensor, op)
        return self._run(how, [tensor], land, self.comm.allreduce, host, op.name, codec=codec)

    def allreduce_joined(self, tensors: Sequence[Tensor], op: Reduction, how: How) -> dist.Work:
        """Combines several tensors of one type, all of them complex or none, in one call."""
        flat = joined([op.contribution(tensor) for tensor in tensors])
        host, land = in_place(flat)
        codec = self._reduction_codec(tensors[0], op)
        after = _sequence(land, lambda: spread(flat, tensors))
        return self._run(how, tensors, after, self.comm.allreduce, host, op.name, codec=codec)

    def reduce(self, tensor: Tensor, root: int, op: Reduction, how: How) -> dist.Work:
        """Combines `tensor` over all ranks into that of `root`."""
        is_root = self.comm.rank == root
        source = op.contribution(tensor)
        host, land = in_place(source) if is_root else (to_send(source), None)
        if is_root and source is not tensor:
            land = _sequence(land, lambda: spread(source.reshape(-1), [tensor]))
        return self._run(how, [tensor], land, self.comm.reduce, host, root, op.name)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: Reduction, how: How, counts: Sequence[int] | None = None
    ) -> dist.Work:
        """Part r of the combined `input` becomes `output` of rank r; parts are equal or have `counts` elements."""
        host, land = to_fill(output)
        source = to_send(op.contribution(input))
        codec = self._reduction_codec(input, op)
        return self._run(how, [output], land, self.comm.reduce_scatter, host, source, op.name, counts=counts, codec=codec)

    def reduce_scatter_list(self, output: Tensor, inputs: Sequence[Tensor], op: Reduction, how: How) -> dist.Work:
        """As `reduce_scatter` with the parts as a list, of any sizes."""
        self._check_length(inputs, "input tensors")
        return self.reduce_scatter(output, joined(inputs), op, how, [tensor.numel() for tensor in inputs])

    # --- data movement ----------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int, how: How) -> dist.Work:
        """Copies `tensor` of `root` to all."""
        if self.comm.rank == root:
            return self._run(how, [tensor], None, self.comm.broadcast, to_send(movable(tensor)), root)
        host, land = to_fill(movable(tensor))
        return self._run(how, [tensor], land, self.comm.broadcast, host, root)

    def all_gather(self, output: Tensor, input: Tensor, how: How) -> dist.Work:
        """Concatenates `input` of all ranks in `output`."""
        host, land = to_fill(movable(output))
        codec = self._gather_codec(input)
        return self._run(how, [output], land, self.comm.all_gather, host, to_send(movable(input)), codec=codec)

    def all_gather_list(self, outputs: Sequence[Tensor], input: Tensor, how: How) -> dist.Work:
        """`outputs[r]` becomes `input` of rank r; sizes may differ."""
        self._check_length(outputs, "output tensors")
        targets = [movable(tensor) for tensor in outputs]
        flat = room_for(targets)
        host, land = to_fill(flat)
        after = _sequence(land, lambda: spread(flat, targets))
        return self._run(
            how,
            outputs,
            after,
            self.comm.all_gather,
            host,
            to_send(movable(input)),
            counts=[tensor.numel() for tensor in targets],
            codec=self._gather_codec(input),
        )

    def all_gather_joined(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], how: How) -> dist.Work:
        """As `all_gather_list` for several tensors of one type at once; `outputs[i][r]` becomes `inputs[i]` of rank r."""
        for each in outputs:
            self._check_length(each, "output tensors")
        by_rank = [movable(row[rank]) for rank in range(self.comm.world_size) for row in outputs]
        flat = room_for(by_rank)
        host, land = to_fill(flat)
        after = _sequence(land, lambda: spread(flat, by_rank))
        source = to_send(joined([movable(tensor) for tensor in inputs]))
        return self._run(how, [tensor for row in outputs for tensor in row], after, self.comm.all_gather, host, source)

    def gather(self, outputs: Sequence[Tensor], input: Tensor, root: int, how: How) -> dist.Work:
        """`outputs[r]` of `root` becomes `input` of rank r; other ranks give no outputs."""
        source = to_send(movable(input))
        if self.comm.rank != root:
            if outputs:
                raise ValueError(f"gather: rank {self.comm.rank} gave output tensors, but the root is rank {root}")
            return self._run(how, [], None, self.comm.gather, source, None, root)
        self._check_length(outputs, "output tensors")
        targets = [movable(tensor) for tensor in outputs]
        self._check_equal(targets, source, "gather")
        flat = room_for(targets)
        host, land = to_fill(flat)
        return self._run(how, outputs, _sequence(land, lambda: spread(flat, targets)), self.comm.gather, source, host, root)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, how: How) -> dist.Work:
        """`output` of rank r becomes `inputs[r]` of `root`; other ranks give no inputs."""
        host, land = to_fill(movable(output))
        source = None
        if self.comm.rank == root:
            self._check_length(inputs, "input tensors")
            parts = [movable(tensor) for tensor in inputs]
            self._check_equal(parts, host, "scatter")
            source = to_send(joined(parts))
        elif inputs:
            raise ValueError(f"scatter: rank {self.comm.rank} gave input tensors, but the root is rank {root}")
        return self._run(how, [output], land, self.comm.scatter, host, source, root)

    def all_to_all(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], how: How
    ) -> dist.Work:
        """Part p of `input` goes to rank p; sizes count rows of the first dimension, none means equal parts."""
        host, land = to_fill(movable(output))
        return self._run(
            how,
            [output],
            land,
            self.comm.all_to_all,
            host,
            to_send(movable(input)),
            output_counts=_elements(output, output_sizes),
            input_counts=_elements(input, input_sizes),
        )

    def all_to_all_list(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], how: How) -> dist.Work:
        """`inputs[p]` goes to `outputs[rank]` of rank p; sizes may differ."""
        self._check_length(outputs, "output tensors")
        self._check_length(inputs, "input tensors")
        targets, sources = [movable(tensor) for tensor in outputs], [movable(tensor) for tensor in inputs]
        flat = room_for(targets)
        host, land = to_fill(flat)
        return self._run(
            how,
            outputs,
            _sequence(land, lambda: spread(flat, targets)),
            self.comm.all_to_all,
            host,
            to_send(joined(sources)),
            output_counts=[tensor.numel() for tensor in targets],
            input_counts=[tensor.numel() for tensor in sources],
        )

    def barrier(self, how: How) -> dist.Work:
        """Returns when all ranks have called it."""
        return self._run(how, [], None, self.comm.barrier)

    # --- point to point ---------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, peer: int, tag: int, timeout_s: float) -> dist.Work:
        """Sends `tensor` to rank `peer`; always returns at once."""
        return self._run(How(True, timeout_s), [tensor], None, self.comm.send, to_send(movable(tensor)), peer, tag)

    def recv(self, tensor: Tensor, peer: int | None, tag: int, timeout_s: float) -> dist.Work:
        """Receives `tensor` from rank `peer`, or any if None; always returns at once."""
        host, land = to_fill(movable(tensor))
        return self._run(How(True, timeout_s), [tensor], land, self.comm.recv, host, peer, tag)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _run(
        self, how: How, outputs: Sequence[Tensor], after: Step | None, start: Start, *args: object, **named: object
    ) -> dist.Work:
        """Starts a call of the communicator; `after` is its last step. A synchronous one has ended when this returns."""
        try:
            work = start(*args, async_op=how.async_op, timeout_s=how.timeout_s, **named)
        except SquinchError as error:
            kin = translated(error)
            raise kin from kin.__cause__
        if isinstance(work, Work):
            if after is not None:
                work.then(after)
            return GroupWork(work, outputs, self._callbacks)
        if after is not None:
            after()
        return FinishedWork(outputs)

    def _reduction_codec(self, tensor: Tensor, op: Reduction) -> str | None:
        """What the guard around the call asks for: a codec, "none", or None for what the group does anyway."""
        guard = current_guard()
        config, counts = self.comm.config, self.comm.stats.uncompressed
        if views_complex(tensor):
            counts["dtype"] += 1
            return "none"
        if guard is None:
            return None
        codec = guard.codec or config.codec
        if codec != AUTO and get_codec(codec).lossless:
            return "none"
        reason = misfit(_FLOATS.get(tensor.dtype, _OTHER), op.name, asked=guard.codec not in (None, AUTO))
        if reason is None and guard.lossless:
            reason = "guard"
        if reason is None:
            return codec
        counts[reason] += 1
        return "none"

    def _gather_codec(self, tensor: Tensor) -> str | None:
        guard = current_guard()
        if guard is None or guard.lossless or not guard.all_gather:
            return None
        return self._reduction_codec(tensor, Reduction(""))

    def _sparse_allreduce(self, tensor: Tensor, op: Reduction, how: How) -> dist.Work:
        """Sums sparse tensors: gathers everybody's indices and values. Done when it returns, in three calls."""
        if tensor.layout != torch.sparse_coo or op.name != "sum" or not tensor.is_cpu:
            raise ValueError(f"squinch reduces sparse COO tensors on the CPU with SUM, not {tensor.layout} with {op.name!r}")
        how = How(False, how.timeout_s)
        own = tensor.detach().coalesce()
        entries = self._sparse_sizes(own, how)
        rows, width = own.indices(), own.values()[:1].numel() or int(np.prod(own.values().shape[1:]))
        indices = [rows.new_empty(count * rows.shape[0]) for count in entries]
        values = [own.values().new_empty(count * width) for count in entries]
        self.all_gather_list(indices, rows.t().reshape(-1), how)
        self.all_gather_list(values, own.values().reshape(-1), how)
        total = torch.sparse_coo_tensor(
            torch.cat(indices).view(-1, rows.shape[0]).t(),
            torch.cat(values).view(-1, *own.values().shape[1:]),
            tensor.shape,
        ).coalesce()
        with torch.no_grad():
            tensor.copy_(total)  # a detached sparse tensor would get the copy for itself
        return FinishedWork([tensor])

    def _sparse_sizes(self, own: Tensor, how: How) -> list[int]:
        """Number of entries of each rank's sparse tensor; all must have one shape."""
        mine = torch.tensor([own._nnz(), own.sparse_dim(), *own.shape])
        rows = torch.empty(self.comm.world_size, mine.numel(), dtype=torch.int64)
        self.all_gather(rows, mine, how)
        for peer, row in enumerate(rows):
            if not torch.equal(row[1:], rows[0, 1:]):
                raise GroupMismatch(
                    f"allreduce of sparse tensors on rank {self.comm.rank}: rank 0's has shape {rows[0, 2:].tolist()} with "
                    f"{rows[0, 1]} sparse dimensions, rank {peer}'s {row[2:].tolist()} with {row[1]}",
                    rank=self.comm.rank,
                    peer=peer,
                    op="allreduce",
                )
        return rows[:, 0].tolist()

    def _check_length(self, tensors: Sequence[Tensor], what: str) -> None:
        if len(tensors) != self.comm.world_size:
            raise ValueError(f"{len(tensors)} {what} were given in a group of {self.comm.world_size} ranks; give one a rank")
        if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            raise TypeError(f"{what} differ in dtype: {', '.join(sorted({str(tensor.dtype) for tensor in tensors}))}")

    def _check_equal(self, tensors: Sequence[Tensor], own: Tensor, what: str) -> None:
        for rank, tensor in enumerate(tensors):
            if tensor.numel() != own.numel():
                raise ValueError(
                    f"{what}: the tensor of rank {rank} has {tensor.numel()} elements, this rank's has {own.numel()}; all need one size"
                )


def views_complex(tensor: Tensor) -> bool:
    """Whether these are the real and imaginary parts of complex numbers, which torch.distributed hands over in their place."""
    return tensor._is_view() and tensor._base is not None and tensor._base.is_complex()


def _sequence(first: Step | None, second: Step) -> Step:
    if first is None:
        return second

    def both() -> None:
        first()
        second()

    return both


def _elements(tensor: Tensor, sizes: Sequence[int]) -> list[int] | None:
    if not sizes:
        return None
    rows = tensor.shape[0] if tensor.dim() else 0
    if sum(sizes) != rows:
        raise ValueError(f"split sizes {list(sizes)} add up to {sum(sizes)}, but the first dimension has {rows}")
    width = tensor.numel() // rows if rows else 0
    return [size * width for size in sizes]
