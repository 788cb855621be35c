"""Errors of the backend: those of squinchcomm that are torch.distributed's at the same time.

Code written for other backends catches RuntimeError or `torch.distributed.DistError`; code written for this one catches
`squinchcomm.PeerLost` and its kin. Each works.
"""

from __future__ import annotations

import torch.distributed as dist

from squinchcomm.errors import CollectiveTimeout, CommunicatorAborted, MismatchError, PeerLost, SquinchError, WireFormatError


class GroupTimeout(CollectiveTimeout, dist.DistBackendError):
    """A collective or a message of a process group did not finish in time."""


class GroupPeerLost(PeerLost, dist.DistNetworkError):
    """A rank of a process group died, broke its connection or fell silent."""


class GroupMismatch(MismatchError, dist.DistBackendError):
    """Ranks of a process group made different calls."""


class GroupWireError(WireFormatError, dist.DistNetworkError):
    """A frame of a process group was damaged on its way."""


class GroupAborted(CommunicatorAborted, dist.DistBackendError):
    """A process group was aborted, destroyed or broken by an earlier failure."""


_KIN: dict[type[SquinchError], type[SquinchError]] = {
    CollectiveTimeout: GroupTimeout,
    PeerLost: GroupPeerLost,
    MismatchError: GroupMismatch,
    WireFormatError: GroupWireError,
    CommunicatorAborted: GroupAborted,
}


def translated(error: BaseException) -> BaseException:
    """The same error as torch.distributed's kin, caused by it; others as they are."""
    kind = _KIN.get(type(error))  # type: ignore[arg-type]
    if kind is None:
        return error
    assert isinstance(error, SquinchError)
    # These words are what code written for gloo looks for.
    text = f"squinch: Timed out waiting: {error}" if kind is GroupTimeout else str(error)
    made = kind(text, rank=error.rank, peer=error.peer, op=error.op, sequence=error.sequence)
    made.__cause__ = error
    return made
