"""How ranks of an MPI job find each other's transports."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence

import msgspec

from squinchcomm.errors import ConfigError, PeerLost

from .address import MAX_ADDRESS_BYTES, host_identity
from .base import Backend, Listener, Transport
from .mpi_link import Inbox, MpiAddress, MpiLink
from .mpi_pieces import UNLIMITED, piece_bytes
from .mpi_transport import MpiTransport
from .mpi_world import MpiWorld, join_world, wait_until
from .options import TransportOptions
from .shared_memory import Arena
from .shared_payloads import SharedPayloads, open_doorway

_ADDRESS_VERSION = 2
_JOIN_TIMEOUT_S = 60.0


class MpiListener(Listener):
    """A tag that nobody else has."""

    def __init__(self, world: MpiWorld, options: TransportOptions) -> None:
        self._world = world
        self._options = options
        self._tag = world.take_tag()
        self._lock = world.lock()
        session = secrets.randbits(32)
        self._doorway = open_doorway(session) if options.shared_memory else None
        self._own = MpiAddress(
            version=_ADDRESS_VERSION,
            world=world.identity,
            dest=world.rank,
            tag=self._tag,
            session=session,
            window=options.window,
            max_payload_bytes=options.max_payload_bytes,
            host=options.host if options.host is not None else host_identity(),
            uid=os.getuid(),
            doorway=self._doorway.name if self._doorway is not None else None,
            piece_bytes=piece_bytes(),
        )
        self.address = msgspec.msgpack.encode(self._own)
        self._open = True

    def connect(self, rank: int, addresses: Sequence[bytes], timeout_s: float) -> Transport:
        if not self._open:
            raise RuntimeError("this listener is closed or already connected")
        self._open = False
        deadline = time.monotonic() + timeout_s
        try:
            links = self._links(rank, addresses)
            arena = self._share_memory(rank, links, timeout_s)
        except BaseException:
            self._close_doorway()
            raise
        if self._doorway is not None:
            self._doorway.close()
        with self._lock:
            inbox = Inbox(self._world, self._tag, len(links), arena)
        hosts = [self._read(blob, peer).host for peer, blob in enumerate(addresses)]
        transport = MpiTransport(rank, hosts, inbox, links, self._own.session, self._options)
        if not wait_until(transport.greeted_by_all, deadline - time.monotonic()):
            missing = transport.not_greeted()
            transport.close(0.0)
            raise PeerLost(f"rank {missing[0]} did not connect within {timeout_s:g} s", rank=rank, peer=missing[0])
        return transport

    def close(self) -> None:
        self._open = False
        self._close_doorway()

    def _close_doorway(self) -> None:
        if self._doorway is not None:
            self._doorway.close()
            self._doorway.arena.close()

    def _links(self, rank: int, addresses: Sequence[bytes]) -> list[MpiLink]:
        if len(addresses) > self._world.most_ranks:
            raise ConfigError(f"a group of {len(addresses)} ranks; {self._world.most_ranks} is the most in this MPI job")
        group = [self._read(blob, peer) for peer, blob in enumerate(addresses)]
        if group[rank] != self._own:
            raise ConfigError(f"rank {rank} listens elsewhere than at addresses[{rank}]")
        return [self._link(peer, each) for peer, each in enumerate(group) if peer != rank]

    def _link(self, peer: int, address: MpiAddress) -> MpiLink:
        own = self._own
        near = self._options.shared_memory and (address.host, address.uid) == (own.host, own.uid)
        pieces = UNLIMITED if address.host == own.host else max(address.piece_bytes, own.piece_bytes)
        return MpiLink(peer, address, near, pieces)

    def _share_memory(self, rank: int, links: Sequence[MpiLink], timeout_s: float) -> Arena | None:
        """Maps the memory of the peers on this host, and they ours; None if there are none."""
        near = [link for link in links if link.near]
        if self._doorway is None or not near:
            return None
        peers = {link.rank: (link.doorway, link.session) for link in near if link.doorway is not None}
        memory = self._doorway.exchange(rank, peers, timeout_s)
        for link in near:
            if link.rank in memory:
                link.shared = SharedPayloads(memory[link.rank])
        return self._doorway.arena

    def _read(self, blob: bytes, peer: int) -> MpiAddress:
        try:
            address = msgspec.msgpack.decode(blob[: MAX_ADDRESS_BYTES + 1], type=MpiAddress)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"the address of rank {peer} cannot be read ({error}): is its transport mpi, and its squinchcomm the same?",
                peer=peer,
            ) from None
        for what, theirs, ours in (
            ("the version of addresses", address.version, self._own.version),
            ("the MPI communicator", address.world.hex(), self._own.world.hex()),
            ("window", address.window, self._own.window),
            ("max_payload_bytes", address.max_payload_bytes, self._own.max_payload_bytes),
        ):
            if theirs != ours:
                raise ConfigError(
                    f"{what} is {theirs} on rank {peer} and {ours} here; it must be the same on all ranks", peer=peer
                )
        if address.dest >= self._world.size:
            raise ConfigError(f"rank {peer} says it is {address.dest} of {self._world.size} in the MPI communicator", peer=peer)
        return address


class MpiBackend(Backend):
    """MPI, through mpi4py."""

    name = "mpi"

    def __init__(self, options: TransportOptions, world: MpiWorld | None = None) -> None:
        """Without a `world` all processes of MPI_COMM_WORLD make their first backend together."""
        if options.link_rate is not None:
            raise ConfigError("the mpi transport cannot limit its link's rate: unset link_rate (SQUINCH_LINK_RATE)")
        if options.security == "curve":
            raise ConfigError(
                "MPI does not encrypt: set security (SQUINCH_SECURITY) to auto on a network that you trust, or use the zmq transport"
            )
        self._options = options
        self._world = world if world is not None else join_world(None, _JOIN_TIMEOUT_S)

    def listen(self) -> Listener:
        return MpiListener(self._world, self._options)
