"""The process group: names and forms of torch.distributed, old and new, over `Core`.

torch 2.13 renamed operations and calls some by their old and some by their new name, from Python and from C++. A name left out
would go to torch's own dispatch, which knows no backend here; so every one is defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import ReduceOp

from squinchcomm.torch.core import Core, How, views_complex
from squinchcomm.torch.monitor import monitored_barrier
from squinchcomm.torch.options import Options
from squinchcomm.torch.reductions import reduction
from squinchcomm.torch.untraced import untraced
from squinchcomm.torch.works import JoinedWork

Tensor = torch.Tensor


@untraced
class SquinchProcessGroup(dist.ProcessGroup):
    """One group of ranks of the backend "squinch".

    Attributes:
        squinch_options: Its settings.
        communicator: What carries it, with `stats`.
    """

    def __init__(self, core: Core, store: Store, name: str, options: Options) -> None:
        super().__init__(core.comm.rank, core.comm.world_size)  # the form with a store fails for subclasses
        self.squinch_options = options
        self.communicator = core.comm
        self._core = core
        self._store = store
        self._name = name
        self._description = "undefined"
        self._timeout_s = core.comm.config.timeout_s
        self._collected: list[dist.Work] | None = None

    # --- reductions -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Tensors, or one, and AllreduceOptions or a ReduceOp."""
        return self._note(self._core.allreduce(_only(tensors), _reduction(opts), self._how(opts, timeout)))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Several tensors at once, each type in one call."""
        op, how = _reduction(opts), self._how(opts)
        kinds: dict[tuple[torch.dtype, torch.device, bool], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device, views_complex(tensor)), []).append(tensor)
        return self._joined([self._core.allreduce_joined(alike, op, how) for alike in kinds.values()])

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Tensors and ReduceOptions, or one tensor, root and ReduceOp."""
        chosen = _reduction(op if isinstance(opts, int) else opts)
        return self._note(self._core.reduce(_only(tensors), _root(opts), chosen, self._how(opts, timeout)))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Lists of outputs and of lists of inputs, or one output and its list of inputs."""
        parts = inputs if isinstance(inputs[0], Tensor) else _single(inputs)
        return self._note(self._core.reduce_scatter_list(_only(outputs), parts, _reduction(opts), self._how(opts, timeout)))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """One tensor in, of which each rank gets an equal part."""
        return self._note(self._core.reduce_scatter(output, input, _reduction(opts), self._how(opts)))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """As many `reduce_scatter_single` as there are tensors."""
        op, how = _reduction(opts), self._how(opts)
        return self._joined(
            [self._core.reduce_scatter(output, input, op, how) for output, input in zip(outputs, inputs, strict=True)]
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- gathering and scattering -----------------------------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Lists of lists of outputs and of inputs, or a list of outputs and one input."""
        parts = outputs if isinstance(outputs[0], Tensor) else _single(outputs)
        return self._note(self._core.all_gather_list(parts, _only(inputs), self._how(opts, timeout)))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """One tensor out, the concatenation of all."""
        return self._note(self._core.all_gather(output, input, self._how(opts)))

    _allgather_base = all_gather_single

    def allgather_coalesced(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Several tensors at once: `outputs[r][i]` becomes `inputs[i]` of rank r."""
        how = self._how(opts)
        kinds: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(inputs):
            kinds.setdefault(tensor.dtype, []).append(index)
        works = []
        for indices in kinds.values():
            rows = [[row[index] for row in outputs] for index in indices]
            works.append(self._core.all_gather_joined(rows, [inputs[index] for index in indices], how))
        return self._joined(works)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """As many `all_gather_single` as there are tensors."""
        how = self._how(opts)
        return self._joined([self._core.all_gather(output, input, how) for output, input in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Lists and GatherOptions, or a list of outputs, one input and the root."""
        parts = outputs if not outputs or isinstance(outputs[0], Tensor) else _single(outputs)
        return self._note(self._core.gather(parts, _only(inputs), _root(opts), self._how(opts, timeout)))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Lists and ScatterOptions, or one output, a list of inputs and the root."""
        parts = inputs if not inputs or isinstance(inputs[0], Tensor) else _single(inputs)
        return self._note(self._core.scatter(_only(outputs), parts, _root(opts), self._how(opts, timeout)))

    # --- movement ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Tensors and BroadcastOptions, or one tensor and the root."""
        return self._note(self._core.broadcast(_only(tensors), _root(opts), self._how(opts, timeout)))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """One tensor in and out; sizes along the first dimension, none for equal parts."""
        how = self._how(opts)
        return self._note(self._core.all_to_all(output, input, output_split_sizes, input_split_sizes, how))

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """A list of tensors in and out, one a rank."""
        return self._note(self._core.all_to_all_list(outputs, inputs, self._how(opts)))

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        """To rank `dst` of the group."""
        return self._note(self._core.send(_only(tensors), dst, tag, self._timeout_s))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        """From rank `src` of the group."""
        return self._note(self._core.recv(_only(tensors), src, tag, self._timeout_s))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """From any rank; the work knows which."""
        return self._note(self._core.recv(_only(tensors), None, tag, self._timeout_s))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """All ranks meet."""
        return self._note(self._core.barrier(self._how(opts, timeout)))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """All ranks meet; rank 0 names those that did not come."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        monitored_barrier(self.communicator, self._timeout_s if seconds is None else seconds, wait_all_ranks)

    # --- coalescing -------------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """Collects the works of the calls up to `_end_coalescing`."""
        self._collected = []

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        """One work for all calls since `_start_coalescing`."""
        collected, self._collected = self._collected or [], None
        return JoinedWork(collected)

    def _note(self, work: dist.Work) -> dist.Work:
        if self._collected is not None:
            self._collected.append(work)
        return work

    def _joined(self, works: list[dist.Work]) -> dist.Work:
        return self._note(works[0] if len(works) == 1 else JoinedWork(works))

    # --- life -------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finishes pending calls and frees everything; `destroy_process_group` calls it."""
        self._core.close()

    def abort(self) -> None:
        """Makes pending and later calls fail, here and on ranks that wait for this one."""
        self.communicator.abort("the process group was aborted")

    def set_timeout(self, timeout: timedelta) -> None:
        """Deadline of later calls that name none."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # --- names ------------------------------------------------------------------------------------------------------

    def name(self) -> str:
        """The backend's name."""
        return "squinch"

    getBackendName = _get_backend_name = name  # noqa: N815

    @property
    def group_name(self) -> str:
        """The group's name, by which functional collectives find it."""
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        """As `group_name`."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What the user calls the group."""
        return self._description

    def getGroupDesc(self) -> str:  # noqa: N802
        """As `group_desc`."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, device: torch.device) -> Any:
        """The group is its own backend; torch asks this for what it supports."""
        return self

    supports_coalescing = supports_splitting = supports_shrinking = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """No: memory for communication is ordinary memory."""
        return False

    def get_group_store(self) -> Store:
        """The store through which the group's ranks met."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: ranks start with the same number."""

    def _get_sequence_number_for_group(self) -> int:
        return self.communicator.sequence

    def _has_hooks(self) -> bool:
        return False

    def _how(self, opts: Any, timeout: timedelta | None = None) -> How:
        """From an options object; forms without one give only a timeout, perhaps in its place, and return at once."""
        async_op = getattr(opts, "asyncOp", True)
        given = timeout or (opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None))
        seconds = 0.0 if given is None else given.total_seconds()
        return How(async_op, seconds if seconds > 0 else self._timeout_s)


def _only(tensors: Any) -> Tensor:
    """The tensor: bare, or in a list of one. Lists of several meant several devices a process, long ago."""
    if isinstance(tensors, Tensor):
        return tensors
    tensor: Tensor = _single(tensors)
    return tensor


def _single(items: Any) -> Any:
    if len(items) != 1:
        raise ValueError(
            f"{len(items)} tensors or lists were given where a process has one; use the coalesced form for several"
        )
    return items[0]


def _reduction(opts: Any) -> Any:
    if opts is None:
        return reduction(ReduceOp.SUM)
    return reduction(getattr(opts, "reduceOp", opts))


def _root(opts: Any) -> int:
    """Of an options object, a bare rank, or 0."""
    root: int = 0 if opts is None else getattr(opts, "rootRank", opts)
    return root
