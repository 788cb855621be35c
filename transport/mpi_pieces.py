"""Payloads cut into messages that MPI sends off without asking the receiver first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from .mpi_world import MPI

# From `btl_tcp_eager_limit` on, 64 KiB with its own header, Open MPI over TCP asks before it sends (rendezvous). Question and answer
# queue behind whatever travels between the two ranks; see docs/decisions/0008-pieces-over-mpi.md.
_EAGER_BYTES = (64 << 10) - (1 << 10)
UNLIMITED = 1 << 30  # a payload never has more
_FABRICS = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))


def piece_bytes() -> int:
    """The most bytes of a payload that a message between hosts should have, as far as this host knows.

    Fabrics that read a sender's memory ask, too, but nothing queues in front of the answer; MPICH over TCP does not ask.
    """
    asks = MPI.Get_library_version().startswith("Open MPI")
    return UNLIMITED if not asks or any(map(_has_devices, _FABRICS)) else _EAGER_BYTES


def _has_devices(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False


class Pieces:
    """Requests of one payload's messages, in their order, as if they were one."""

    __slots__ = ("_left", "_nbytes")

    def __init__(self) -> None:
        self._left: deque[MPI.Request] = deque()
        self._nbytes = 0

    def start(self, post: Callable[[memoryview], MPI.Request], payload: memoryview, most: int) -> None:
        """Posts a payload in messages of `most` bytes, the last excepted. What was posted before an error is kept."""
        for begin in range(0, len(payload), most):
            self._left.append(post(payload[begin : begin + most]))

    def Test(self, status: MPI.Status | None = None) -> bool:  # noqa: N802  as MPI.Request.Test
        """Whether all are complete; `status` then has the bytes of all. After an error those behind it are left."""
        left = self._left
        while left:
            try:
                if not left[0].Test(status):
                    return False
            except MPI.Exception:
                left.popleft()
                raise
            if status is not None:
                self._nbytes += status.count
            left.popleft()
        if status is not None:
            status.count = self._nbytes
        return True
