"""Two levels: ranks of one host combine through its memory, one exchange runs between the hosts, results come back through memory.

Of S bytes that encode to q S, a host of L among H sends 2 (H-1)/H q S for an allreduce, where the pairwise exchange of its L ranks sends
L times as much. Every shard has a combiner on each host; the one on its home host, `home`, makes the sum. Chunk by chunk:

1. LOCAL: each rank hands its part of the shard, exact, to the combiner on its host.
2. SCATTER: the combiner sums the parts of its host in rank order and sends the sum, encoded, to the home rank.
3. The home rank sums the parts of its own host, exact, and the sums of the others, in the order of the hosts.
4. GATHER (allreduce): it sends the result, encoded, to the other combiners and to the ranks of its host; combiners pass those bytes on
   to theirs. Everybody, the home rank included, takes the result from them.

A value is quantised twice at most, as in the pairwise exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from squinchcomm.collectives.call import Call, Job
from squinchcomm.collectives.channel import Parcel, Piece, make_parcel
from squinchcomm.collectives.coder import Coder
from squinchcomm.collectives.plan import Plan

SCATTER, GATHER, LOCAL = 0, 1, 2


class Topology:
    """Which ranks share a host.

    Attributes:
        hosts: Ranks of each host, ascending; hosts in the order of their first rank.
        host_of: Index into `hosts` for each rank.
        lanes: Ranks on the smallest host.
    """

    def __init__(self, identities: Sequence[str]) -> None:
        groups: dict[str, list[int]] = {}
        for rank, identity in enumerate(identities):
            groups.setdefault(identity, []).append(rank)
        self.hosts = list(groups.values())
        self.host_of = [0] * len(identities)
        for host, ranks in enumerate(self.hosts):
            for rank in ranks:
                self.host_of[rank] = host
        self.lanes = min(map(len, self.hosts))


class Shard(NamedTuple):
    """A part of the array: its combiner on each host, the rank that makes its sum, and that rank's host."""

    combiners: tuple[int, ...]
    home: int
    host: int


def allreduce_shards(topology: Topology) -> list[Shard]:
    """One shard for each lane and host: lane l consists of the l-th rank of each host."""
    shards = []
    for lane in range(topology.lanes):
        combiners = tuple(ranks[lane] for ranks in topology.hosts)
        shards += [Shard(combiners, combiners[host], host) for host in range(len(topology.hosts))]
    return shards


def reduce_scatter_shards(topology: Topology) -> list[Shard]:
    """One shard a rank, whose home it is; the ranks of another host share its shards among themselves."""
    shards = []
    for rank, host in enumerate(topology.host_of):
        place = topology.hosts[host].index(rank)
        combiners = tuple(rank if other == host else ranks[place % len(ranks)] for other, ranks in enumerate(topology.hosts))
        shards.append(Shard(combiners, rank, host))
    return shards


class Hierarchy:
    """One reduction over `whole`, an array cut by `plan` into `shards`. See the module's text for the steps."""

    def __init__(
        self, call: Call, coder: Coder, plan: Plan, whole: np.ndarray, topology: Topology, shards: list[Shard]
    ) -> None:
        self.call = call
        self.coder = coder
        self.plan = plan
        self.whole = whole
        self.shards = shards
        self.host = topology.host_of[call.rank]
        self.locals = topology.hosts[self.host]
        self.neighbours = [rank for rank in self.locals if rank != call.rank]
        self.hosts = len(topology.hosts)
        self._stride = max(plan.chunks(shard) for shard in range(len(shards)))
        self._held: dict[int, dict[int, Piece]] = {}
        self._seen: set[tuple[int, int, int]] = set()
        self._result: np.ndarray | None = None
        call.share_work(plan.chunk * whole.itemsize)

    def allreduce(self) -> None:
        """`whole` becomes the reduction over all ranks."""
        for index, shard in enumerate(self.shards):
            if shard.home != self.call.rank:
                self.call.expect(self._gather_source(shard), self.plan.chunks(index))
        self._reduce()

    def reduce_scatter(self, output: np.ndarray) -> None:
        """`output` becomes this rank's shard of the reduction; `whole` is only read."""
        self._result = output
        self._reduce()

    def _gather_source(self, shard: Shard) -> int:
        if shard.host == self.host or shard.combiners[self.host] == self.call.rank:
            return shard.home
        return shard.combiners[self.host]

    def _reduce(self) -> None:
        call, rank = self.call, self.call.rank
        for index, shard in enumerate(self.shards):
            chunks = self.plan.chunks(index)
            if shard.combiners[self.host] == rank:
                for peer in self.neighbours:
                    call.expect(peer, chunks)
            if shard.home == rank:
                for host, combiner in enumerate(shard.combiners):
                    if host != self.host:
                        call.expect(combiner, chunks)
        for peer in self.neighbours:
            call.make(peer, self._contributions(peer))
        if not self.neighbours:
            for combiner in {shard.home for shard in self.shards if shard.host != self.host}:
                call.make(combiner, self._lone_sums(combiner))
        call.run(self._handle)

    def _order(self, indices: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Shard and chunk, chunk by chunk; shards of other hosts first, beginning with the next host, for the link to be busy."""
        near = sorted(indices, key=lambda index: (self.shards[index].host - self.host - 1) % self.hosts)
        for chunk in range(self._stride):
            for index in near:
                if chunk < self.plan.chunks(index):
                    yield index, chunk

    def _contributions(self, peer: int) -> Iterator[Parcel]:
        mine = [index for index, shard in enumerate(self.shards) if shard.combiners[self.host] == peer]
        for index, chunk in self._order(mine):
            start, stop = self.plan.span(index, chunk)
            data = self.whole[start:stop].view(np.uint8)
            yield self.call.lossless_parcel(LOCAL, self._number(index, chunk), data, (peer,))

    def _lone_sums(self, home: int) -> Iterator[Parcel]:
        """What a rank that is alone on its host sends to one home rank."""
        mine = [index for index, shard in enumerate(self.shards) if shard.home == home]
        for index, chunk in self._order(mine):
            yield self._host_sum(index, chunk, {})

    def _number(self, index: int, chunk: int) -> int:
        return index * self._stride + chunk

    def _handle(self, piece: Piece) -> Job | None:
        index, chunk = divmod(piece.chunk, self._stride)
        if index >= len(self.shards) or chunk >= self.plan.chunks(index):
            raise self.call.broken(piece, "lies outside the plan")
        if (piece.phase, piece.chunk, piece.peer) in self._seen or piece.phase not in (SCATTER, GATHER, LOCAL):
            raise self.call.broken(piece, "came twice or is of no phase")
        self._seen.add((piece.phase, piece.chunk, piece.peer))
        start, stop = self.plan.span(index, chunk)
        due = (stop - start) * self.whole.itemsize if piece.phase == LOCAL else self.coder.nbytes(stop - start)
        if piece.payload.size != due:
            raise self.call.broken(piece, f"has {piece.payload.size} bytes where {due} were due")
        if piece.phase == GATHER:
            return Job(lambda: self._take(piece, start, stop), lambda parcel: self._taken(piece, parcel))
        return self._hold(piece, index, chunk)

    def _take(self, piece: Piece, start: int, stop: int) -> Parcel | None:
        """Decodes a result; the parcel to pass on, if that is ours to do."""
        self.coder.incoming(piece.payload, self.whole[start:stop])
        if piece.peer in self.locals or not self.neighbours:
            return None
        room = self.call.room(piece.payload.size, self.neighbours)
        payload = np.empty_like(piece.payload) if room is None else room
        payload[:] = piece.payload
        return self._parcel(GATHER, piece.chunk, payload, stop - start, shared=room is not None)

    def _taken(self, piece: Piece, parcel: Parcel | None) -> None:
        piece.release()
        if parcel is not None:
            for peer in self.neighbours:
                self.call.post(peer, parcel)

    def _hold(self, piece: Piece, index: int, chunk: int) -> Job | None:
        shard = self.shards[index]
        row = self._held.setdefault(piece.chunk, {})
        row[piece.peer] = piece
        home = shard.home == self.call.rank
        if len(row) < len(self.neighbours) + (self.hosts - 1 if home else 0):
            return None
        del self._held[piece.chunk]
        if home:
            return Job(lambda: self._total(index, chunk, row), lambda parcel: self._finished(parcel, shard, row))
        return Job(lambda: self._host_sum(index, chunk, row), lambda parcel: self._finished(parcel, shard, row))

    def _own_parts(self, own: np.ndarray, row: dict[int, Piece]) -> list[Any]:
        """The exact contributions of this host's ranks, in rank order."""
        return [own if peer == self.call.rank else row[peer].payload.view(self.whole.dtype) for peer in self.locals]

    def _host_sum(self, index: int, chunk: int, row: dict[int, Piece]) -> Parcel:
        start, stop = self.plan.span(index, chunk)
        own = self.whole[start:stop]
        key = self._key(SCATTER, index, chunk)
        if not row:
            payload = self.coder.outgoing(own, key, None)
            return self._parcel(SCATTER, self._number(index, chunk), payload, own.size, borrow=self.coder.borrow)
        payload = self.coder.partial(self._own_parts(own, row), own, key, None)
        return self._parcel(SCATTER, self._number(index, chunk), payload, own.size)

    def _total(self, index: int, chunk: int, row: dict[int, Piece]) -> Parcel | None:
        shard = self.shards[index]
        start, stop = self.plan.span(index, chunk)
        own = self.whole[start:stop]
        inputs: list[Any] = []
        for host, combiner in enumerate(shard.combiners):
            inputs += self._own_parts(own, row) if host == self.host else [row[combiner].payload]
        if self._result is not None:
            base = self.plan.bounds[index]
            self.coder.combine_into(inputs, self._result[start - base : stop - base])
            return None
        room = self.call.room(self.coder.nbytes(stop - start), self.neighbours)
        payload = self.coder.combine(inputs, own, self._key(GATHER, index, chunk), room)
        self.coder.settle(payload, own)
        # With a checksum even if it lies in shared memory: other hosts get it too.
        borrow = self.coder.borrow and room is None
        return self._parcel(GATHER, self._number(index, chunk), payload, own.size, borrow=borrow)

    def _parcel(self, phase: int, number: int, payload: np.ndarray, count: int, **how: bool) -> Parcel:
        return make_parcel(phase, number, payload, raw_bytes=count * self.whole.itemsize, **how)

    def _listeners(self, shard: Shard) -> list[int]:
        """Whom this rank tells the result of its shard: other hosts first."""
        return [combiner for combiner in shard.combiners if combiner != self.call.rank] + self.neighbours

    def _finished(self, parcel: Parcel | None, shard: Shard, row: dict[int, Piece]) -> None:
        if parcel is not None:
            for peer in self._listeners(shard) if parcel.phase == GATHER else (shard.home,):
                self.call.post(peer, parcel)
        for piece in row.values():
            piece.release()

    def _key(self, phase: int, index: int, chunk: int) -> int:
        """Numbers the encodings of all ranks in this collective."""
        return ((chunk * 2 + phase) * len(self.shards) + index) * self.hosts + self.host
