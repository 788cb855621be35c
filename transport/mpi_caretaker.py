"""Looks after MPI transports that nobody looks at, because MPI moves bytes only while somebody calls it; and ends them at exit."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .mpi_world import MPI, MpiWorld, any_process_died

if TYPE_CHECKING:
    from .mpi_transport import MpiTransport

_IDLE_S = 0.01
_ACTIVE_S = 0.001
_FAREWELL_S = 1.0
_FINALIZE_S = 10
_TOLD_S = 0.3  # what a process said just before MPI_Abort, a launcher may drop
_END_S = 5.0  # for a caretaker that waits for the interpreter's lock

_transports: weakref.WeakSet[MpiTransport] = weakref.WeakSet()
_silent: set[int] = set()
_lock = threading.RLock()
_caretaker: Caretaker | None = None


class Caretaker(threading.Thread):
    """Takes what arrives for idle transports: else a peer that sent a large payload waits until this rank's next call.

    With MPI_THREAD_SERIALIZED there is none, so that between calls the user's own thread may be in MPI.
    """

    def __init__(self) -> None:
        super().__init__(name="squinchcomm-mpi", daemon=True)
        self._ending = threading.Event()

    def run(self) -> None:
        pause_s = _IDLE_S
        while not self._ending.wait(pause_s):
            with _lock:
                transports = list(_transports)
            moved = [transport for transport in transports if _tend(transport)]
            pause_s = _ACTIVE_S if moved else _IDLE_S
            del transports, moved  # the last reference to a forgotten one must not be ours

    def end(self) -> bool:
        """Stops the thread; False if it does not stop."""
        self._ending.set()
        if self is not threading.current_thread():
            self.join(_END_S)
        return not self.is_alive()


def adopt(transport: MpiTransport, world: MpiWorld) -> None:
    """Looks after a transport until it is closed or forgotten."""
    global _caretaker
    with _lock:
        _transports.add(transport)
        if _caretaker is None and not world.serialized:
            _caretaker = Caretaker()
            _caretaker.start()


def dismiss(transport: MpiTransport, silent: Sequence[int]) -> None:
    """Takes `adopt` back; without transports the thread ends. `silent`: MPI ranks that did not answer its goodbye."""
    global _caretaker
    with _lock:
        _silent.update(silent)
        _transports.discard(transport)
        last = _caretaker if not _transports else None
        if last is not None:
            _caretaker = None
    if last is not None:
        last.end()


def _tend(transport: MpiTransport) -> bool:
    if transport.busy:
        transport.busy = False
        return False
    if not transport.lock.acquire(blocking=False):
        return False
    try:
        return transport.tend()
    finally:
        transport.lock.release()


@atexit.register
def _at_exit() -> None:
    """Says goodbye for transports that were not closed, before mpi4py finalises MPI, which waits for all processes of the job."""
    with _lock:
        transports = list(_transports)
    if MPI.Is_finalized():
        return
    for transport in transports:
        transport.vanish(_FAREWELL_S)
    # After an error MPI_Finalize would wait for ever for a rank that hangs.
    if _silent and getattr(sys, "last_value", None) is not None:
        print(
            f"squinchcomm: this process ends with an error while rank {', '.join(map(str, sorted(_silent)))} does not answer: "
            "ending the whole MPI job (MPI_Abort)",
            file=sys.stderr,
            flush=True,
        )
        try:
            time.sleep(_TOLD_S)
        finally:  # a signal may end the pause
            MPI.COMM_WORLD.Abort(1)
    if any_process_died():
        # Open MPI's finalisation may wait for the dead for ever, unless mpirun was told `--mca async_mpi_finalize 1`.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_FINALIZE_S)


def _in_child() -> None:
    global _caretaker, _lock
    _lock = threading.RLock()
    for transport in list(_transports):
        transport.disown()
    _transports.clear()
    _caretaker = None


os.register_at_fork(after_in_child=_in_child)
