"""Payloads cut into messages that MPI sends off without asking the receiver first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from .mpi_world import MPI

# From `btl_tcp_eager_limit` on, 64 KiB with its own header, Open MPI over TCP asks before it sends (rendezvous). Question and answer
# queue behind whatever travels between the two ranks; see docs/decisions/0008-pieces-over-mpi.md.
_EAGER_BYTES = (64 << 10) - (1 << 10)
_FABRICS = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))


def piece_bytes() -> int:
    """The most bytes of a payload that a message between hosts should have, as far as this host knows; 0: as many as it likes.

    Fabrics that read a sender's memory ask, too, but nothing queues in front of the answer; MPICH over TCP does not ask.
    """
    asks = MPI.Get_library_version().startswith("Open MPI")
    return 0 if not asks or any(map(_has_devices, _FABRICS)) else _EAGER_BYTES


def _has_devices(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def cut(payload: memoryview, most: int) -> Iterator[memoryview]:
    """Parts of `most` bytes, the last excepted; the whole payload if `most` is 0."""
    step = most or len(payload)
    for start in range(0, len(payload), step):
        yield payload[start : start + step]


class Pieces:
    """Requests of one payload's messages, in their order, as if they were one.

    Attributes:
        nbytes: Received so far.
    """

    __slots__ = ("_left", "nbytes")

    def __init__(self) -> None:
        self._left: deque[MPI.Request] = deque()
        self.nbytes = 0

    def add(self, request: MPI.Request) -> None:
        """Appends the request of the next message."""
        self._left.append(request)

    def Test(self, status: MPI.Status | None = None) -> bool:  # noqa: N802  as MPI.Request.Test
        """Whether all are complete; of receives, with a `status`, the bytes are counted."""
        left = self._left
        while left:
            if not left[0].Test(status):
                return False
            if status is not None:
                self.nbytes += status.count
            left.popleft()
        return True
