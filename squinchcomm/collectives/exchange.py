"""Pairwise exchange: the pipelined algorithm behind allreduce, reduce_scatter, reduce and all_gather.

Rank r owns shard r. For n ranks and S bytes of array each rank sends 2 (n-1)/n S for an allreduce, in two phases that overlap chunk by
chunk:

1. SCATTER: each rank sends its part of shard p to rank p, for all p.
2. Rank r, once it has chunk c of its shard from everybody, sums it in rank order (its own part exact).
3. GATHER: it sends the sum to everybody.
4. Everybody, the owner included, takes the sum from those bytes: all ranks hold the same bits.

With a lossy codec a value is quantised twice whatever the number of ranks; a ring would quantise at every hop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from squinchcomm.collectives.call import Call, Job
from squinchcomm.collectives.channel import Parcel, Piece, make_parcel
from squinchcomm.collectives.coder import Coder
from squinchcomm.collectives.plan import Plan

SCATTER, GATHER, DIRECT = 0, 1, 2

_DIRECT_BYTES = 16 << 10
_DIRECT_RANKS = 8


def runs_direct(lossless: bool, nbytes: int, ranks: int) -> bool:
    """Whether an all-reduce is one step instead of two: small arrays are sent whole to everybody and summed by everybody."""
    return lossless and nbytes <= _DIRECT_BYTES and 1 < ranks <= _DIRECT_RANKS


class Exchange:
    """One pairwise exchange over `whole`, an array cut by `plan`. See the module's text for the steps."""

    def __init__(self, call: Call, coder: Coder, plan: Plan, whole: np.ndarray) -> None:
        self.call = call
        self.coder = coder
        self.plan = plan
        self.whole = whole
        self._held: dict[int, dict[int, Piece]] = {}
        self._combined: set[int] = set()
        self._gathered: set[tuple[int, int]] = set()
        self._result: np.ndarray | None = None
        self._sum: np.ndarray | None = None
        self._gather_to: list[int] = []
        call.share_work(plan.chunk * whole.itemsize)

    def allreduce(self) -> None:
        """`whole` becomes the reduction over all ranks."""
        self._gather_to = self.call.others()
        self._expect_gather()
        self._scatter()

    def reduce(self, root: int) -> None:
        """As `allreduce` on `root`; other ranks' arrays are only read."""
        if self.call.rank == root:
            self._expect_gather()
        else:
            self._gather_to = [root]
            bounds = self.plan.bounds[self.call.rank : self.call.rank + 2]
            self._sum = self.whole[bounds[0] : bounds[1]].copy()
        self._scatter()

    def reduce_scatter(self, output: np.ndarray) -> None:
        """`output` becomes this rank's shard of the reduction; `whole` is only read."""
        self._result = output
        self._scatter()

    def all_gather(self, own: np.ndarray) -> None:
        """`whole` becomes the concatenation of all ranks' `own` arrays; equal shards are cut into equal chunks."""
        others = self.call.others()
        self._expect_gather()
        self.call.make(others[0], self._own_chunks(own, others[1:]))
        self.call.run(self._handle)

    def _own_chunks(self, own: np.ndarray, rest: list[int]) -> Iterator[Parcel]:
        """Yields what goes to one peer and posts the same to the others: each chunk is encoded once."""
        plan, rank = self.plan, self.call.rank
        base = plan.bounds[rank]
        for chunk in range(plan.chunks(rank)):
            start, stop = plan.span(rank, chunk)
            room = self._room(stop - start, self.call.others())
            payload = self.coder.outgoing(own[start - base : stop - base], self._key(GATHER, chunk), room)
            self.coder.incoming(payload, self.whole[start:stop])
            parcel = self._parcel(GATHER, chunk, payload, room, stop - start)
            for peer in rest:
                self.call.post(peer, parcel)
            yield parcel

    def _expect_gather(self) -> None:
        for peer in self.call.others():
            self.call.expect(peer, self.plan.chunks(peer))

    def _scatter(self) -> None:
        call = self.call
        chunks = self.plan.chunks(call.rank)
        for peer in call.others():
            call.make(peer, self._contributions(peer))
            call.expect(peer, chunks)
        call.run(self._handle)

    def _contributions(self, peer: int) -> Iterator[Parcel]:
        for chunk in range(self.plan.chunks(peer)):
            start, stop = self.plan.span(peer, chunk)
            room = self._room(stop - start, (peer,))
            payload = self.coder.outgoing(self.whole[start:stop], self._key(SCATTER, chunk, peer), room)
            yield self._parcel(SCATTER, chunk, payload, room, stop - start)

    def _room(self, count: int, peers: Collection[int]) -> np.ndarray | None:
        return self.call.room(self.coder.nbytes(count), peers)

    def _parcel(self, phase: int, chunk: int, payload: np.ndarray, room: np.ndarray | None, count: int) -> Parcel:
        shared = room is not None
        raw_bytes = count * self.whole.itemsize
        return make_parcel(phase, chunk, payload, borrow=self.coder.borrow and not shared, shared=shared, raw_bytes=raw_bytes)

    def _key(self, phase: int, chunk: int, peer: int = 0) -> int:
        """Numbers the encodings of all ranks in this collective."""
        ranks = self.call.world_size
        return ((chunk * 2 + phase) * ranks + peer) * ranks + self.call.rank

    def _handle(self, piece: Piece) -> Job | None:
        if piece.phase == SCATTER:
            return self._hold(piece)
        if piece.phase != GATHER:
            raise self.call.broken(piece, "has an unknown phase")
        start, stop = self._span(piece, piece.peer)
        if (piece.peer, piece.chunk) in self._gathered:
            raise self.call.broken(piece, "came twice")
        self._gathered.add((piece.peer, piece.chunk))
        return Job(lambda: self.coder.incoming(piece.payload, self.whole[start:stop]), lambda _: piece.release())

    def _hold(self, piece: Piece) -> Job | None:
        self._span(piece, self.call.rank)
        row = self._held.setdefault(piece.chunk, {})
        if piece.peer in row or piece.chunk in self._combined:
            raise self.call.broken(piece, "came twice")
        row[piece.peer] = piece
        if len(row) < self.call.world_size - 1:
            return None
        self._combined.add(piece.chunk)
        del self._held[piece.chunk]
        return Job(lambda: self._combine(piece.chunk, row), lambda parcel: self._combined_chunk(parcel, row))

    def _combine(self, chunk: int, row: dict[int, Piece]) -> Parcel | None:
        """Sums one chunk of this rank's shard; the parcel that tells the others, if they are to know."""
        rank, coder = self.call.rank, self.coder
        start, stop = self.plan.span(rank, chunk)
        own = self.whole[start:stop]
        inputs = [own if peer == rank else row[peer].payload for peer in range(self.call.world_size)]
        base = self.plan.bounds[rank]
        if self._result is not None:
            coder.combine_into(inputs, self._result[start - base : stop - base])
            return None
        total = own if self._sum is None else self._sum[start - base : stop - base]
        room = self._room(stop - start, self._gather_to)
        payload = coder.combine(inputs, total, self._key(GATHER, chunk), room)
        coder.settle(payload, total)
        return self._parcel(GATHER, chunk, payload, room, stop - start)

    def _combined_chunk(self, parcel: Parcel | None, row: dict[int, Piece]) -> None:
        if parcel is not None:
            for peer in self._gather_to:
                self.call.post(peer, parcel)
        for piece in row.values():
            piece.release()

    def _span(self, piece: Piece, shard: int) -> tuple[int, int]:
        if piece.chunk >= self.plan.chunks(shard):
            raise self.call.broken(piece, f"lies outside the {self.plan.chunks(shard)} chunks of shard {shard}")
        start, stop = self.plan.span(shard, piece.chunk)
        due = self.coder.nbytes(stop - start)
        if piece.payload.size != due:
            raise self.call.broken(piece, f"has {piece.payload.size} bytes where {due} were due")
        return start, stop


def direct_allreduce(call: Call, coder: Coder, array: np.ndarray) -> None:
    """Everybody sends its whole array to everybody and sums all in rank order: n - 1 times the bytes, one step."""
    payload = array.tobytes()
    parts: list[np.ndarray | None] = [None] * call.world_size
    parts[call.rank] = np.frombuffer(payload, np.uint8)
    parcel = make_parcel(DIRECT, 0, payload)
    for peer in call.others():
        call.post(peer, parcel)
        call.expect(peer, 1)

    def keep(piece: Piece) -> None:
        if piece.phase != DIRECT or piece.payload.size != len(payload):
            raise call.broken(piece, f"has {piece.payload.size} bytes where {len(payload)} were due")
        parts[piece.peer] = piece.payload
        held.append(piece)

    held: list[Piece] = []
    call.run(keep)
    coder.combine_into(parts, array)
    for piece in held:
        piece.release()
