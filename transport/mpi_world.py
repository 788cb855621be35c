"""The MPI communicator under the `mpi` transport: a duplicate of the user's, its tags, its meetings and its dead processes."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import msgspec

from squinchcomm.errors import ConfigError, PeerLost, SquinchError, WireFormatError

if os.environ.get("OMPI_MCA_mpi_ft_enable") == "1":  # noqa: SIM112  what `mpirun --with-ft ulfm` sets
    # Else MPI_Finalize waits for all processes of the job, sometimes for dead ones too. Too late if MPI is initialised already.
    os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")

try:
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library that it could load
    raise ImportError(
        f"the mpi transport needs mpi4py and an MPI library: pip install 'squinchcomm[mpi]' ({error})", name="mpi4py"
    ) from error

MAX_BLOB_BYTES = 64 << 10
_MEETING_TAGS = 2048  # below the tags of endpoints; meetings take two each, in turns
_LEAST_RANKS = 64
_LEAST_TAG_UB = 32767  # that MPI guarantees
_POLL_S = 0.001
_LOOK_EVERY_S = 0.05
_GRACE_S = 1.0  # rank 0 tells the others of a meeting that failed this much before they would give up themselves


class Testable(Protocol):
    """A request, or several as one."""

    def Test(self, status: MPI.Status | None = None) -> bool:  # noqa: N802
        """Whether MPI is done with its memory."""


class Reply(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What rank 0 answers at the end of a meeting: everybody's blobs, or the ranks that did not come."""

    blobs: list[bytes]
    missing: list[int]


class MpiWorld:
    """All processes of one MPI communicator, through a duplicate that carries nothing but our traffic.

    Attributes:
        comm: The duplicate.
        identity: 16 bytes, the same on all its ranks and unlike those of any other.
        most_ranks: How many a group can have; more than there are processes if several ranks are threads of one.
        serialized: MPI was initialised with MPI_THREAD_SERIALIZED: only one thread may be in MPI at a time.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.identity = b""
        self.serialized = MPI.Query_thread() < MPI.THREAD_MULTIPLE
        self.orphans: list[tuple[Testable, Any]] = []
        self._lock = threading.RLock()
        self._guard = self._lock if self.serialized else nullcontext()
        self._meetings = 0
        self._endpoints = 0
        self.most_ranks = max(self.size, _LEAST_RANKS)
        self._places = (int(comm.Get_attr(MPI.TAG_UB) or _LEAST_TAG_UB) - _MEETING_TAGS) // (self.most_ranks + 1)
        self._failed: frozenset[int] = frozenset()
        self._looked_at = 0.0
        self._watches = True

    def lock(self) -> Any:
        """A lock to hold around calls into MPI: one of its own for each caller, or the same for all with SERIALIZED."""
        return self._lock if self.serialized else threading.RLock()

    def take_tag(self) -> int:
        """A tag for an endpoint of this process, and as many behind it as a group can have ranks.

        Tags come back after all others have been used: hundreds of times with the fewest tags that MPI allows, millions with what
        Open MPI and MPICH have. A message of an endpoint before would be noticed by its session.
        """
        with self._lock:
            place = self._endpoints % self._places
            self._endpoints += 1
        return _MEETING_TAGS + place * (self.most_ranks + 1)

    def leave_behind(self, requests: Sequence[tuple[Testable, Any]]) -> None:
        """Keeps the memory of requests that may never complete for as long as MPI may touch it."""
        with self._lock:
            self.orphans = [orphan for orphan in (*self.orphans, *requests) if not over(orphan[0])]

    def failed(self) -> frozenset[int]:
        """Ranks whose processes MPI knows to be dead; asks it every 0.05 s at most. Empty without ULFM."""
        now = time.monotonic()
        if self._watches and now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            with self._guard:
                self._ask_for_failures()
        return self._failed

    def _ask_for_failures(self) -> None:
        try:
            group = self.comm.Get_failed()
        except (MPI.Exception, NotImplementedError):
            self._watches = False
            return
        if group.Get_size() > len(self._failed):
            _failures.add(self.identity)
            self._failed = frozenset(group.Translate_ranks(range(group.Get_size()), self.comm.Get_group()))
        group.Free()

    def acknowledge_failures(self) -> None:
        """Lets receives from any source go on after a process has died."""
        self.comm.Ack_failed()
        self._looked_at = 0.0

    # --- meetings

    def exchange(self, blob: bytes, timeout_s: float) -> list[bytes]:
        """The blobs of all ranks, in rank order; all ranks call it. A blob has at most 64 KiB.

        Raises:
            PeerLost: names the ranks that did not come within `timeout_s`, or died.
        """
        if len(blob) > MAX_BLOB_BYTES:
            raise ValueError(f"a blob of {len(blob)} bytes; at most {MAX_BLOB_BYTES} are allowed")
        tag = 2 * self._meetings % _MEETING_TAGS
        self._meetings += 1
        with _mapped(self.rank):
            return self._preside(blob, tag, timeout_s) if self.rank == 0 else self._attend(blob, tag, timeout_s)

    def _preside(self, blob: bytes, tag: int, timeout_s: float) -> list[bytes]:
        blobs: dict[int, bytes] = {0: blob}
        deadline = time.monotonic() + timeout_s
        while len(blobs) < self.size and time.monotonic() < deadline and not self.failed() - blobs.keys():
            came = self._next_message(MPI.ANY_SOURCE, tag)
            if came is None:
                time.sleep(_POLL_S)
            else:
                blobs[came[0]] = came[1]
        missing = [rank for rank in range(self.size) if rank not in blobs]
        reply = Reply([], missing) if missing else Reply([blobs[rank] for rank in range(self.size)], [])
        message = msgspec.msgpack.encode(reply)
        with self._guard:
            sends = [(self.comm.Isend([message, MPI.BYTE], peer, tag + 1), message) for peer in blobs if peer != 0]
        if not self._wait_until(
            lambda: all(request.Test() for request, _ in sends), max(_GRACE_S, deadline - time.monotonic())
        ):
            self.leave_behind(sends)
        return self._concluded(reply, timeout_s)

    def _attend(self, blob: bytes, tag: int, timeout_s: float) -> list[bytes]:
        with self._guard:
            sent = self.comm.Isend([blob, MPI.BYTE], 0, tag)
        came: list[tuple[int, bytes]] = []

        def answered() -> bool:
            sent.Test()
            message = self._next_message(0, tag + 1)
            if message is not None:
                came.append(message)
            return bool(came) or 0 in self.failed()

        self._wait_until(answered, timeout_s + 2 * _GRACE_S)
        if not came:
            self.leave_behind([(sent, blob)])
            how = "its process died" if 0 in self.failed() else f"no answer within {timeout_s:g} s"
            raise PeerLost(f"no group was formed: rank 0 did not come to the meeting ({how})", rank=self.rank, peer=0)
        return self._concluded(_decode(came[0][1]), timeout_s)

    def _concluded(self, reply: Reply, timeout_s: float) -> list[bytes]:
        if reply.missing:
            named = ", ".join(map(str, reply.missing[:16])) + (" and more" if len(reply.missing) > 16 else "")
            dead = [rank for rank in reply.missing if rank in self.failed()]
            how = f"; the process of rank {dead[0]} died" if dead else ""
            raise PeerLost(
                f"no group was formed: rank {named} did not come within {timeout_s:g} s{how}",
                rank=self.rank,
                peer=reply.missing[0],
            )
        return reply.blobs

    def _next_message(self, source: int, tag: int) -> tuple[int, bytes] | None:
        status = MPI.Status()
        with self._guard:
            message = self.comm.Improbe(source, tag, status)
            if message is None:
                return None
            buffer = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([buffer, MPI.BYTE])
        return status.source, bytes(buffer)

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        def guarded() -> bool:
            with self._guard:
                return condition()

        return wait_until(guarded, timeout_s)


def join_world(comm: MPI.Intracomm | None, timeout_s: float) -> MpiWorld:
    """The world of `comm` (None: MPI_COMM_WORLD), made the first time, kept with it. A collective call of all its ranks.

    Raises:
        ConfigError: MPI is not initialised, is finalised, or has no support for threads; `comm` is no communicator to join.
        PeerLost: not all ranks called this within `timeout_s`.
    """
    _check_mpi()
    comm = MPI.COMM_WORLD if comm is None else comm
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ConfigError("comm is MPI_COMM_NULL: this process is not one of its ranks and must not call init")
    if not isinstance(comm, MPI.Intracomm):
        raise ConfigError(f"comm must be an mpi4py.MPI.Intracomm, not {type(comm).__name__}")
    world = comm.Get_attr(_world_key())
    if not isinstance(world, MpiWorld):
        world = MpiWorld(_duplicate(comm, timeout_s))
        comm.Set_attr(_world_key(), world)
    if not world.identity:
        world.identity = world.exchange(secrets.token_bytes(16), timeout_s)[0]
    return world


def any_process_died() -> bool:
    """Whether MPI has told any world of this process of a dead process."""
    return bool(_failures)


def _check_mpi() -> None:
    if MPI.Is_finalized():
        raise ConfigError("MPI is finalised already; call squinchcomm.init before MPI.Finalize")
    if not MPI.Is_initialized():
        raise ConfigError("MPI is not initialised: call MPI.Init_thread() first, or leave mpi4py.rc.initialize as it is")
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        name = "MPI_THREAD_SINGLE" if MPI.Query_thread() == MPI.THREAD_SINGLE else "MPI_THREAD_FUNNELED"
        raise ConfigError(
            f"MPI was initialised with {name}, but calls come from several threads: at least MPI_THREAD_SERIALIZED is needed; set "
            'mpi4py.rc.thread_level = "multiple" before `from mpi4py import MPI`, or call MPI_Init_thread with MPI_THREAD_MULTIPLE'
        )


def _duplicate(comm: MPI.Intracomm, timeout_s: float) -> MPI.Intracomm:
    rank = comm.Get_rank()
    with _mapped(rank):
        copy, request = comm.Idup()
        if not wait_until(request.Test, timeout_s):
            raise PeerLost(
                f"no group was formed: rank {rank} of {comm.Get_size()} called squinchcomm.init, but not all others did within "
                f"{timeout_s:g} s; every rank of the MPI communicator has to",
                rank=rank,
            )
        copy.Set_errhandler(MPI.ERRORS_RETURN)
    return copy


_failures: set[bytes] = set()
_key: int | None = None


def _world_key() -> int:
    """The attribute under which a user's communicator keeps its world; duplicates of it do not inherit it."""
    global _key
    if _key is None:
        _key = MPI.Comm.Create_keyval(delete_fn=_forget)
    return _key


def _forget(comm: MPI.Comm, keyval: int, world: object) -> None:
    """The user frees a communicator, which all its ranks do together: so can we."""
    if isinstance(world, MpiWorld) and not world.orphans and not MPI.Is_finalized():
        world.comm.Free()


def describe(error: MPI.Exception) -> str:
    """An MPI error in one line."""
    return " ".join(error.Get_error_string().split())


def is_process_failure(error: MPI.Exception) -> bool:
    """Whether ULFM reports a dead process by this error."""
    failures = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
    return MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN and error.Get_error_class() in failures


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Asks `condition` until it is true; False if that takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pause_s = _POLL_S / 16
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S)
    return True


@contextmanager
def _mapped(rank: int) -> Iterator[None]:
    """Errors of MPI as ours."""
    try:
        yield
    except MPI.Exception as error:
        kind: type[SquinchError] = PeerLost if is_process_failure(error) else ConfigError
        raise kind(f"no group was formed: {describe(error)}", rank=rank) from error


def _decode(message: bytes) -> Reply:
    try:
        return msgspec.msgpack.decode(message, type=Reply)
    except msgspec.MsgspecError as error:
        raise WireFormatError(f"rank 0 runs another version of squinchcomm: {error}", peer=0) from None


def over(request: Testable) -> bool:
    """Whether MPI is done with a request's memory, well or not. Of several as one, an error ends a single one."""
    while True:
        try:
            done = bool(request.Test())
        except MPI.Exception:
            done = isinstance(request, MPI.Request)
            if not done:
                continue
        if done and isinstance(request, MPI.Prequest):
            request.Free()
        return done
