"""The end of a process that has not closed its communicators: what their calls have sent still leaves, and peers hear goodbye.

A call returns when this rank has its result. What others need for theirs may still wait for the network then.
"""

from __future__ import annotations

import weakref
from multiprocessing.util import Finalize
from typing import Protocol


class Closable(Protocol):
    """A communicator."""

    @property
    def in_flight(self) -> int:
        """Number of collectives that are queued or running."""

    def close(self) -> None:
        """Ends it."""


def close_at_exit(comm: Closable) -> None:
    """Closes `comm` when the process ends, unless a call is running then: those would be waited for.

    By a finalizer of multiprocessing: children of that module end without running what `atexit` knows.
    """
    Finalize(comm, _close_if_idle, (weakref.ref(comm),), exitpriority=10)


def _close_if_idle(reference: weakref.ref[Closable]) -> None:
    comm = reference()
    if comm is not None and comm.in_flight == 0:
        comm.close()
