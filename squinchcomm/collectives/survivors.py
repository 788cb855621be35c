"""Ranks that are left after a failure agree on who they are.

Each tells all others whom it has lost, together with a blob; whoever hears of a loss it did not know tells all again. It ends when
all that are left have said the same. Losses are never taken back, so it ends after at most as many rounds as ranks are lost
meanwhile. A rank that others take for lost is told so and gives up. Where nobody can tell it, because the network is cut in two, each
side goes on by itself.
"""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import numpy as np

from squinchcomm.collectives import wire
from squinchcomm.collectives.wire import Signature
from squinchcomm.errors import CollectiveTimeout, PeerLost
from squinchcomm.transport.base import Frame, Transport

_SLICE_S = 0.05
_MAX_BLOB_BYTES = 64 << 10


class Ballot(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a rank tells the others: in which attempt, whom it has lost, and its blob."""

    attempt: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    lost: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]]
    blob: Annotated[bytes, msgspec.Meta(max_length=_MAX_BLOB_BYTES)]


class Assembly:
    """One attempt of this rank to agree with the others, over a transport that carries nothing else any more."""

    def __init__(self, transport: Transport, epoch: int, attempt: int, blob: bytes) -> None:
        self._transport = transport
        self._rank = transport.rank
        self._epoch = epoch
        self._attempt = attempt
        self._blob = blob
        self._lost: set[int] = set()
        self._heard: dict[int, Ballot] = {}
        self._untold: set[int] = set()

    def agree(self, timeout_s: float) -> dict[int, bytes]:
        """Blobs of all ranks that are left, this one included, by rank.

        Raises:
            CollectiveTimeout: a rank that is not lost did not take part within `timeout_s`; names it.
            PeerLost: the others take this rank for lost.
        """
        deadline = time.monotonic() + timeout_s
        everybody = set(range(self._transport.world_size)) - {self._rank}
        self._untold = set(everybody)
        while True:
            # All that arrived counts before any loss: it may say that we are the lost ones.
            while self._take(0.0):
                pass
            self._lose(set(self._transport.lost))
            self._tell()
            left = everybody - self._lost
            silent = [peer for peer in left if peer not in self._heard or set(self._heard[peer].lost) != self._lost]
            if not silent and not self._untold - set(self._transport.lost):
                return {self._rank: self._blob, **{peer: self._heard[peer].blob for peer in left}}
            if time.monotonic() >= deadline:
                names = ", ".join(map(str, sorted(silent)))
                raise CollectiveTimeout(
                    f"shrink on rank {self._rank}: rank {names} did not take part within {timeout_s:g} s: it is not lost, so it has to "
                    "call shrink too",
                    rank=self._rank,
                    peer=min(silent, default=None),
                    op="shrink",
                )
            self._take(min(_SLICE_S, max(0.0, deadline - time.monotonic())))

    def _take(self, timeout_s: float) -> bool:
        frame = self._transport.recv(timeout_s)
        if frame is None:
            return False
        self._hear(frame)
        frame.release()
        return True

    def _tell(self) -> None:
        payload = msgspec.msgpack.encode(Ballot(self._attempt, sorted(self._lost), self._blob))
        signature = Signature("barrier", kind=wire.BALLOT).pack(self._epoch, self._attempt)
        header = wire.frame_header(signature, 0, 0, 0, len(payload), wire.payload_crc(payload))
        for peer in sorted(self._untold - set(self._transport.lost)):
            try:
                self._transport.send(peer, header, payload, urgent=True)
            except BlockingIOError:
                continue  # it has not released what it got before; it will when it takes part
            self._untold.discard(peer)

    def _hear(self, frame: Frame) -> None:
        """Takes note of a ballot of this attempt; whatever was on its way when the group broke is dropped."""
        payload = np.frombuffer(frame.payload, np.uint8)
        if not wire.is_intact(frame.header, payload, in_place=frame.in_place):
            return
        header = wire.read_header(frame.header[: wire.SIGNATURE_BYTES])
        if header.magic != wire.MAGIC or header.kind != wire.BALLOT or header.epoch != self._epoch:
            return
        try:
            ballot = msgspec.msgpack.decode(payload.tobytes(), type=Ballot)
        except msgspec.MsgspecError:
            return
        if ballot.attempt != self._attempt:
            return
        if self._rank in ballot.lost:
            raise PeerLost(
                f"shrink on rank {self._rank}: rank {frame.peer} takes this rank for lost, so it is not in the new group",
                rank=self._rank,
                peer=frame.peer,
                op="shrink",
            )
        self._heard[frame.peer] = ballot
        self._lose({peer for peer in ballot.lost if peer < self._transport.world_size})

    def _lose(self, more: set[int]) -> None:
        if not more <= self._lost:
            self._lost |= more
            # Those whom only others have lost are told, too: they have to give up.
            self._untold = set(range(self._transport.world_size)) - {self._rank}
