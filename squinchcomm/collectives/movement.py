"""Collectives that move data and compute nothing: barrier, broadcast, gather, scatter, all_to_all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from squinchcomm.collectives.call import Call
from squinchcomm.collectives.channel import Parcel, Piece, make_parcel
from squinchcomm.collectives.plan import MAX_CHUNK_BYTES, Plan
from squinchcomm.errors import MismatchError

MOVE, FORWARD, LAST = 0, 1, 2

# Larger broadcasts are scattered and passed on, so that the root sends the array once and not n - 1 times.
RELAY_BYTES = 64 << 10


class Movement:
    """Byte ranges that go out to and come in from peers in chunks of one size.

    The last chunk of a range says that it is the last, and an empty range is one empty chunk: so ranks that disagree about a size,
    which signatures cannot hold where it differs from peer to peer, learn of it at the first chunk that does not fit.
    """

    def __init__(self, call: Call, chunk_bytes: int = 0) -> None:
        self.call = call
        self.chunk = chunk_bytes or MAX_CHUNK_BYTES
        self._into: dict[int, np.ndarray] = {}
        self._seen: set[tuple[int, int]] = set()

    def outgoing(self, peer: int, data: np.ndarray) -> None:
        """Sends `data`, uint8, to `peer`; to this rank itself it is `incoming` that copies."""
        self.call.make(peer, self._parcels(peer, data))

    def incoming(self, peer: int, out: np.ndarray) -> None:
        """Expects as many bytes as `out`, uint8, has from `peer`."""
        self._into[peer] = out
        self.call.expect(peer, self._last(out) + 1)

    def run(self) -> None:
        """Moves everything."""
        self.call.run(self._place)

    def _parcels(self, peer: int, data: np.ndarray) -> Iterator[Parcel]:
        last = self._last(data)
        for chunk in range(last + 1):
            part = data[chunk * self.chunk : (chunk + 1) * self.chunk]
            phase = LAST if chunk == last else MOVE
            yield self.call.lossless_parcel(phase, chunk, part, (peer,)) if part.size else make_parcel(phase, chunk, b"")

    def _last(self, data: np.ndarray) -> int:
        return max(0, data.size - 1) // self.chunk

    def _place(self, piece: Piece) -> None:
        out = self._into[piece.peer]
        start = piece.chunk * self.chunk
        stop = start + piece.payload.size
        if piece.phase not in (MOVE, LAST) or piece.payload.size > self.chunk or (piece.peer, piece.chunk) in self._seen:
            raise self.call.broken(piece, f"of {piece.payload.size} bytes does not fit the plan")
        if stop > out.size or (piece.phase == LAST) != (stop == out.size):
            raise self._mismatch(piece, stop, out.size)
        self._seen.add((piece.peer, piece.chunk))
        out[start:stop] = piece.payload
        piece.release()

    def _mismatch(self, piece: Piece, sent: int, expected: int) -> MismatchError:
        ticket, rank = self.call.ticket, self.call.rank
        return MismatchError(
            f"{ticket.op} #{ticket.sequence} on rank {rank}: rank {piece.peer} sends {'' if piece.phase == LAST else 'more than '}"
            f"{sent} bytes to rank {rank}, which expects {expected}: input_counts[{rank}] there and output_counts[{piece.peer}] here "
            "must be the same",
            rank=rank,
            peer=piece.peer,
            op=ticket.op,
            sequence=ticket.sequence,
        )


def barrier(call: Call) -> None:
    """Returns when all ranks have called it: dissemination in ceil(log2 n) rounds (Hensgen, Finkel and Manber, 1988)."""
    ranks, rank = call.world_size, call.rank
    distances = [1 << step for step in range((ranks - 1).bit_length())]
    sources = [(rank - distance) % ranks for distance in distances]
    arrived: set[int] = set()
    step = 0

    def advance() -> None:
        nonlocal step
        while step < len(distances) and (step == 0 or sources[step - 1] in arrived):
            call.post((rank + distances[step]) % ranks, make_parcel(MOVE, 0, b""))
            step += 1

    def note(piece: Piece) -> None:
        arrived.add(piece.peer)
        piece.release()
        advance()

    for source in sources:
        call.expect(source, 1)
    advance()
    call.run(note)


def broadcast(call: Call, data: np.ndarray, root: int, chunk_bytes: int = 0) -> None:
    """`data`, uint8, of `root` is copied to all ranks' `data`."""
    if call.world_size > 2 and data.size > RELAY_BYTES:
        _relayed_broadcast(call, data, root, chunk_bytes)
        return
    movement = Movement(call, chunk_bytes)
    if call.rank == root:
        for peer in call.others():
            movement.outgoing(peer, data)
    else:
        movement.incoming(root, data)
    movement.run()


def _relayed_broadcast(call: Call, data: np.ndarray, root: int, chunk_bytes: int) -> None:
    """The root sends each other rank a shard, chunk by chunk, which that rank passes on to the rest as it comes."""
    relays = [rank for rank in range(call.world_size) if rank != root]
    plan = Plan.even(data.size, len(relays), 1, 1, chunk_bytes)

    def parcels(shard: int, peer: int) -> Iterator[Parcel]:
        for chunk in range(plan.chunks(shard)):
            start, stop = plan.span(shard, chunk)
            yield call.lossless_parcel(MOVE, chunk, data[start:stop], (peer,))

    seen: set[tuple[int, int]] = set()

    def place(piece: Piece) -> None:
        shard = relays.index(call.rank if piece.peer == root else piece.peer)
        phase = MOVE if piece.peer == root else FORWARD
        if piece.phase != phase or piece.chunk >= plan.chunks(shard) or (shard, piece.chunk) in seen:
            raise call.broken(piece, "does not fit the plan")
        start, stop = plan.span(shard, piece.chunk)
        if piece.payload.size != stop - start:
            raise call.broken(piece, f"has {piece.payload.size} bytes where {stop - start} were due")
        seen.add((shard, piece.chunk))
        data[start:stop] = piece.payload
        piece.release()
        if phase == MOVE:
            rest = [peer for peer in call.others() if peer != root]
            parcel = call.lossless_parcel(FORWARD, piece.chunk, data[start:stop], rest)
            for peer in rest:
                call.post(peer, parcel)

    if call.rank == root:
        for shard, peer in enumerate(relays):
            call.make(peer, parcels(shard, peer))
    else:
        for shard, owner in enumerate(relays):
            call.expect(root if owner == call.rank else owner, plan.chunks(shard))
    call.run(place)


def gather(call: Call, own: np.ndarray, output: np.ndarray | None, root: int, chunk_bytes: int = 0) -> None:
    """Concatenates all ranks' `own`, uint8 of one size, into `output` on `root`."""
    movement = Movement(call, chunk_bytes)
    if call.rank == root:
        assert output is not None
        rows = output.reshape(call.world_size, own.size)
        rows[root] = own
        for peer in call.others():
            movement.incoming(peer, rows[peer])
    else:
        movement.outgoing(root, own)
    movement.run()


def scatter(call: Call, output: np.ndarray, source: np.ndarray | None, root: int, chunk_bytes: int = 0) -> None:
    """Gives each rank its row of `source`, uint8, on `root`, in `output`."""
    movement = Movement(call, chunk_bytes)
    if call.rank == root:
        assert source is not None
        rows = source.reshape(call.world_size, output.size)
        for peer in call.others():
            movement.outgoing(peer, rows[peer])
        output[:] = rows[root]
    else:
        movement.incoming(root, output)
    movement.run()


def all_to_all(
    call: Call,
    output: np.ndarray,
    source: np.ndarray,
    output_bounds: Sequence[int],
    source_bounds: Sequence[int],
    chunk_bytes: int = 0,
) -> None:
    """Part p of `source` goes to rank p; part p of `output` comes from rank p. Bounds are byte offsets, world_size + 1 each."""
    movement = Movement(call, chunk_bytes)
    rank = call.rank
    for peer in call.others():
        movement.outgoing(peer, source[source_bounds[peer] : source_bounds[peer + 1]])
        movement.incoming(peer, output[output_bounds[peer] : output_bounds[peer + 1]])
    output[output_bounds[rank] : output_bounds[rank + 1]] = source[source_bounds[rank] : source_bounds[rank + 1]]
    movement.run()
