"""The engine under every collective: send what may be sent, handle what arrives, until nothing is due."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from squinchcomm.collectives.channel import Channel, ChunkEvent, Parcel, Piece, Ticket, make_parcel
from squinchcomm.errors import WireFormatError

# Smaller chunks are not worth handing to other threads: kernels take 40 us for 1 MiB, as long as a thread takes to wake up and
# to get hold of the interpreter.
POOLED_CHUNK_BYTES = 2 << 20


class Job(NamedTuple):
    """What a frame gives to do: `compute` in any thread, then `finish` in the collective's."""

    compute: Callable[[], Any]
    finish: Callable[[Any], None]


class Gate:
    """Lets tasks of other threads through until it is shut."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_shut = False

    def pass_through(self, task: Callable[[], Any]) -> Any:
        """What `task` returns; None if the gate is shut."""
        with self._changed:
            if self._is_shut:
                return None
            self._inside += 1
        try:
            return task()
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def shut(self) -> None:
        """Lets no more in and waits until all are out."""
        with self._changed:
            self._is_shut = True
            self._changed.wait_for(lambda: not self._inside)


class Call:
    """One collective in progress.

    Each peer has a queue of parcels that are ready and an iterator that makes more; ready ones go first, so that results
    overtake raw contributions. An iterator is asked for its next parcel only when the peer's window has room:
    encoded data does not pile up. With a `pool`, large chunks are encoded and decoded several at a time.
    """

    def __init__(self, channel: Channel, ticket: Ticket, pool: ThreadPoolExecutor | None = None) -> None:
        self.channel = channel
        self._threads = pool
        self._pool: ThreadPoolExecutor | None = None
        self.ticket = ticket
        self.rank = channel.rank
        self.world_size = channel.world_size
        self.waiting: dict[int, int] = {}
        self._others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        self._ready: list[deque[Parcel]] = [deque() for _ in range(self.world_size)]
        self._making: dict[int, Iterator[Parcel]] = {}
        self._queued = 0
        self._borrowed = False
        self._meter = ticket.meter

    def share_work(self, chunk_bytes: int) -> None:
        """Lets the pool work on chunks, which are of `chunk_bytes` of the user's elements, if that is worth it."""
        if chunk_bytes >= POOLED_CHUNK_BYTES:
            self._pool = self._threads

    def others(self) -> list[int]:
        """All other ranks, starting after this one, so that not everybody sends to rank 0 first."""
        return self._others

    def room(self, nbytes: int, peers: Collection[int]) -> np.ndarray | None:
        """Where to put a payload that peers on this host read in place; None if it has to travel."""
        room = self.channel.transport.allocate(nbytes, peers)
        return None if room is None else np.asarray(room)

    def lossless_parcel(self, phase: int, chunk: int, data: np.ndarray, peers: Collection[int]) -> Parcel:
        """A parcel of `data`, a view of the caller's array: lent for the time of the call, or copied to where peers can read it."""
        room = self.room(data.size, peers)
        if room is None:
            return make_parcel(phase, chunk, data, borrow=True)
        room[:] = data
        return make_parcel(phase, chunk, room, shared=True)

    def post(self, peer: int, parcel: Parcel) -> None:
        """Queues a parcel for `peer`."""
        self._ready[peer].append(parcel)
        self._queued += 1
        self._borrowed |= parcel.borrow

    def make(self, peer: int, parcels: Iterator[Parcel]) -> None:
        """Sends what the iterator yields, as the peer's window allows."""
        self._making[peer] = parcels if self.ticket.chunks is None else self._recorded_parcels(peer, parcels)

    def expect(self, peer: int, frames: int) -> None:
        """Says that `frames` more frames are due from `peer`."""
        if frames:
            self.waiting[peer] = self.waiting.get(peer, 0) + frames

    def run(self, handle: Callable[[Piece], Job | None]) -> None:
        """Sends everything, hands each arriving frame to `handle` and does its job, until all is sent and received."""
        channel, ticket, waiting = self.channel, self.ticket, self.waiting
        while True:
            sent = self._send_some()
            unsent = bool(self._queued or self._making)
            if not waiting and not unsent:
                break
            jobs: list[Job] = []
            piece = channel.receive(ticket, waiting, () if sent else self._unsent(), block=not sent)
            while piece is not None:
                self._count(piece)
                job = handle(piece) if ticket.chunks is None else self._recorded_job(piece, handle)
                if job is not None:
                    jobs.append(job)
                # The pool wants all that has come; without one, what this job made is sent before the next.
                piece = channel.receive(ticket, waiting, block=False) if waiting and self._pool is not None else None
            self._do(jobs)
        if self._borrowed:
            channel.flush(ticket, self.others())

    def _send_some(self) -> bool:
        """At most one parcel a peer, so that arrivals are looked at between encodes."""
        if not (self._queued or self._making):
            return False
        transport = self.channel.transport
        lost = transport.lost
        sent = False
        makers = []
        for peer in self.others():
            if self._ready[peer]:
                # What is due to a lost peer stays unsent: the wait for it first hears the peer's last words, then fails.
                if peer not in lost and transport.can_send(peer):
                    self._queued -= 1
                    self.channel.send(self.ticket, peer, self._ready[peer].popleft())
                    sent = True
            elif peer in self._making and transport.can_send(peer):
                makers.append(peer)
        if makers:
            self._make_and_send(makers)
        return sent or bool(makers)

    def _make_and_send(self, peers: list[int]) -> None:
        lost = self.channel.transport.lost
        started = time.perf_counter()
        if self._pool is None or len(peers) == 1:
            made: Iterable[Parcel | None] = (next(self._making[peer], None) for peer in peers)
        else:
            made = self._together([partial(next, self._making[peer], None) for peer in peers])
        for peer, parcel in zip(peers, made, strict=True):
            self._meter.encode_s += time.perf_counter() - started
            if parcel is None:
                del self._making[peer]
            elif peer in lost:
                self.post(peer, parcel)
            else:
                self._borrowed |= parcel.borrow
                self.channel.send(self.ticket, peer, parcel)
            started = time.perf_counter()

    def _do(self, jobs: list[Job]) -> None:
        """Does the jobs, with the pool at once, and empties the list."""
        started = time.perf_counter()
        if self._pool is None or len(jobs) == 1:
            results: Iterable[Any] = (job.compute() for job in jobs)
        else:
            results = self._together([job.compute for job in jobs])
        for job, result in zip(jobs, results, strict=True):
            job.finish(result)
        self._meter.decode_s += time.perf_counter() - started
        jobs.clear()

    def _together(self, tasks: list[Callable[[], Any]]) -> list[Any]:
        """Runs tasks in the pool; when it returns or raises, none of them touches the user's arrays any more."""
        assert self._pool is not None
        gate = Gate()
        try:
            futures = [self._pool.submit(gate.pass_through, task) for task in tasks]
            wait(futures)
        except BaseException:
            # KeyboardInterrupt, perhaps in the middle of a submission, of which no future tells then; or no thread could be started.
            gate.shut()
            raise
        return [future.result() for future in futures]

    def _recorded_parcels(self, peer: int, parcels: Iterator[Parcel]) -> Iterator[Parcel]:
        """As `parcels`, while the time that each takes to make is recorded."""
        while True:
            started = time.monotonic()
            parcel = next(parcels, None)
            if parcel is None:
                return
            self._record("encode", peer, parcel, started)
            yield parcel

    def _recorded_job(self, piece: Piece, handle: Callable[[Piece], Job | None]) -> Job | None:
        """As `handle(piece)`, while the arrival of the piece and the time that its job takes are recorded."""
        started = time.monotonic()
        assert self.ticket.chunks is not None
        self.ticket.chunks.append(
            ChunkEvent("received", piece.peer, piece.phase, piece.chunk, started, float(piece.payload.size))
        )
        job = handle(piece)
        if job is None:
            return None

        def compute() -> Any:
            started = time.monotonic()
            result = job.compute()
            self._record("decode", piece.peer, piece, started)
            return result

        return Job(compute, job.finish)

    def _record(self, what: str, peer: int, part: Parcel | Piece, started: float) -> None:
        assert self.ticket.chunks is not None
        self.ticket.chunks.append(ChunkEvent(what, peer, part.phase, part.chunk, started, time.monotonic() - started))

    def _unsent(self) -> list[int]:
        return [peer for peer in self.others() if self._ready[peer] or peer in self._making]

    def _count(self, piece: Piece) -> None:
        due = self.waiting.get(piece.peer, 0)
        if due <= 0:
            raise self.broken(piece, "was not due")
        if due == 1:
            del self.waiting[piece.peer]
        else:
            self.waiting[piece.peer] = due - 1

    def broken(self, piece: Piece, what: str) -> WireFormatError:
        """The error for a frame that passed its checksum and does not fit the plan."""
        self.channel.stats.frames_corrupt += 1
        ticket = self.ticket
        return WireFormatError(
            f"{ticket.op} #{ticket.sequence} on rank {self.rank}: frame (phase {piece.phase}, chunk {piece.chunk}) of "
            f"rank {piece.peer} {what}",
            rank=self.rank,
            peer=piece.peer,
            op=ticket.op,
            sequence=ticket.sequence,
        )
