"""Encoded bytes from every rank to every other, over any backend of torch.distributed.

Each rank has one slot of equal size for each other rank, going out and coming in. Both halves of a compressed all-reduce travel that
way, as `all_to_all_single` of bytes: a rank's own slot is empty, so nothing is sent to oneself, and gloo, whose all_gather copies
its result through a temporary, needs no memory of its own.
"""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# More exchanges than this are never under way at once: as long as two are, the network has work, and memory stays bounded.
MAX_IN_FLIGHT = 8

_twins: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()  # made of each group


class Slots:
    """Host memory of one exchange: what goes to each other rank, what comes from it, and `own` bytes of this rank."""

    def __init__(self, memory: torch.Tensor, rank: int, world_size: int, slot_bytes: int) -> None:
        self.memory = memory
        self.rank = rank
        self.slot_bytes = slot_bytes
        self.peers = [peer for peer in range(world_size) if peer != rank]
        sizes = [len(self.peers) * slot_bytes, len(self.peers) * slot_bytes, slot_bytes]
        self.outgoing, self.incoming, self.own = memory[: sum(sizes)].split(sizes)
        self._outgoing, self._incoming = self.outgoing.numpy(), self.incoming.numpy()

    def outgoing_to(self, peer: int, nbytes: int) -> np.ndarray:
        """The first `nbytes` of what goes to `peer`."""
        return self._of(self._outgoing, peer, nbytes)

    def incoming_from(self, peer: int, nbytes: int) -> np.ndarray:
        """The first `nbytes` of what came from `peer`."""
        return self._of(self._incoming, peer, nbytes)

    def own_bytes(self, nbytes: int) -> np.ndarray:
        """The first `nbytes` of this rank's own slot."""
        own: np.ndarray = self.own.numpy()
        return own[:nbytes]

    def send_own_to_all(self) -> None:
        """Copies `own` into every outgoing slot."""
        self.outgoing.view(len(self.peers), self.slot_bytes).copy_(self.own)

    def _of(self, part: np.ndarray, peer: int, nbytes: int) -> np.ndarray:
        start = (peer - (peer > self.rank)) * self.slot_bytes
        return part[start : start + nbytes]


class SlotPool:
    """Memory for exchanges, kept from one to the next; at most `MAX_IN_FLIGHT` are out at once, further callers wait."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._out = 0
        self._returned = threading.Condition()

    def take(self, group: dist.ProcessGroup, slot_bytes: int) -> Slots:
        """Slots of `slot_bytes` each. Waits while too many are out, which a `give` of another thread ends."""
        with self._returned:
            self._returned.wait_for(lambda: self._out < MAX_IN_FLIGHT)
            memory = self._fitting((2 * group.size() - 1) * slot_bytes)
            self._out += 1
        return Slots(memory, group.rank(), group.size(), slot_bytes)

    def give(self, slots: Slots) -> None:
        """Takes them back, once nothing reads or writes them any more."""
        with self._returned:
            self._out -= 1
            self._free.append(slots.memory)
            self._returned.notify()

    def _fitting(self, nbytes: int) -> torch.Tensor:
        self._free.sort(key=torch.Tensor.numel)
        for place, memory in enumerate(self._free):
            if memory.numel() >= nbytes:
                return self._free.pop(place)
        if self._free:
            self._free.pop()  # too small: larger buckets replace it, so that the pool holds no more pieces than are used at once
        return torch.empty(nbytes, dtype=torch.uint8)


def exchange(slots: Slots, group: dist.ProcessGroup) -> Any:
    """Starts moving each outgoing slot to its rank; the future is done when all incoming slots are filled."""
    sizes = [slots.slot_bytes] * group.size()
    sizes[slots.rank] = 0
    device = wire_device(group)
    if device.type == "cpu":
        work = dist.all_to_all_single(slots.incoming, slots.outgoing, sizes, sizes, group=group, async_op=True)
        return work.get_future()
    outgoing, incoming = slots.outgoing.to(device), torch.empty_like(slots.incoming, device=device)
    work = dist.all_to_all_single(incoming, outgoing, sizes, sizes, group=group, async_op=True)

    def land(done: Any) -> None:
        done.value()
        slots.incoming.copy_(incoming)

    return work.get_future().then(land)


def wire_device(group: dist.ProcessGroup) -> torch.device:
    """Where the group takes bytes: host memory if it can, else the current GPU (NCCL)."""
    if any(device.type == "cpu" for device in group._device_types):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def twin_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second group of the same ranks in their order, backend and timeout; every rank of `group` makes it at the same time.

    Calls that threads other than the user's make go there, so that their order never mixes with that of the user's calls.
    """
    backend = dist.Backend(dist.get_backend_config(group) if group._device_types else dist.get_backend(group))
    ranks = dist.get_process_group_ranks(group)
    number = _twins[group] = _twins.get(group, 0) + 1
    # Not `new_group`: it counts the groups that a rank has made, and names the next ones by that. Ranks that belong to different
    # numbers of groups would wait for each other under different names, here (torch 2.13) or in a later new_group (2.14).
    made, _ = c10d._new_process_group_helper(
        group.size(),
        group.rank(),
        ranks,
        backend,
        c10d._get_default_store(),
        c10d.GroupName(f"{group.group_name}/squinchcomm-{number}"),
        timeout=_timeout_of(group) or c10d._get_default_timeout(backend),
        device_id=c10d._get_default_group().bound_device_id,
    )
    assert isinstance(made, dist.ProcessGroup)
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    communicator = getattr(group, "communicator", None)
    if communicator is not None:
        return timedelta(seconds=communicator.config.timeout_s)
    options = getattr(group._get_backend(wire_device(group)), "options", None)
    return getattr(options, "_timeout", None)
