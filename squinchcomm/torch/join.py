"""The ranks of a group find each other through torch's store.

1. Rank 0 puts a fresh job token and, unless a key file is given, a fresh key pair into the store; others take them.
2. Each rank opens its listeners and puts their addresses into the store.
3. Rank 0 puts everybody's addresses, or the reason why there will be none, into one entry that the others wait for.

Entries carry the number of the round, counted by each rank, so that a group that is made again does not find old ones.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from datetime import timedelta
from typing import Annotated

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from squinchcomm.bootstrap import transport_options
from squinchcomm.communicator import Communicator
from squinchcomm.config import Config, configure_logging
from squinchcomm.errors import PeerLost
from squinchcomm.joining import join
from squinchcomm.launch import LaunchInfo
from squinchcomm.transport.options import JobKey
from squinchcomm.transport.registry import get_backend
from squinchcomm.transport.security import generate_key

_MAX_WORLD = 16384
_Blob = Annotated[bytes, msgspec.Meta(max_length=64 << 10)]


class _Secret(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    token: str
    public: str
    secret: str


class _Outcome(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    blobs: Annotated[list[_Blob], msgspec.Meta(max_length=_MAX_WORLD)]
    missing: list[int]


def join_group(store: Store, rank: int, world_size: int, config: Config) -> Communicator:
    """Makes the communicator of a group whose ranks share `store`, a store of their own.

    Raises:
        PeerLost: a rank did not come within `config.connect_timeout_s`; names it.
        ConfigError: settings that make no group.
    """
    configure_logging(config.debug, rank)
    if world_size == 1:
        return join(get_backend("inproc"), 0, lambda blob: [blob], config)
    meeting = _Meeting(store, rank, world_size, config.connect_timeout_s)
    secret = meeting.share_secret()
    info = LaunchInfo(
        rank=rank,
        world_size=world_size,
        local_rank=0,
        local_world_size=1,
        address=_store_address(store),
        job_token=os.environ.get("SQUINCH_JOB_TOKEN") or secret.token,
        source="torch",
    )
    options = transport_options(config, info)
    if config.key_file is None and config.security != "none":
        options = dataclasses.replace(options, key=JobKey(secret.public, secret.secret))
    return join(get_backend(config.transport, options), rank, meeting.exchange, config)


class _Meeting:
    """One round of a group's ranks at a store."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._world_size = rank, world_size
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._store = store
        self._round = f"squinch/{store.add(f'squinch/rounds/{rank}', 1)}"

    def share_secret(self) -> _Secret:
        entry = f"{self._round}/secret"
        if self._rank == 0:
            key = generate_key()
            made = _Secret(secrets.token_hex(16), key.public, key.secret)
            self._put(entry, msgspec.msgpack.encode(made))
            return made
        return msgspec.msgpack.decode(self._take(entry, 0), type=_Secret)

    def exchange(self, blob: bytes) -> list[bytes]:
        if self._rank == 0:
            outcome = self._collect(blob)
            self._put(f"{self._round}/all", msgspec.msgpack.encode(outcome))
        else:
            self._put(f"{self._round}/{self._rank}", blob)
            outcome = msgspec.msgpack.decode(self._take(f"{self._round}/all", 0), type=_Outcome)
        if outcome.missing:
            raise self._lost(outcome.missing)
        return list(outcome.blobs)

    def _collect(self, own: bytes) -> _Outcome:
        blobs, missing = [own], []
        for peer in range(1, self._world_size):
            try:
                blobs.append(self._take(f"{self._round}/{peer}", peer))
            except PeerLost:
                missing.append(peer)
        return _Outcome([] if missing else blobs, missing)

    def _put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # its stub says str; bytes work

    def _take(self, key: str, peer: int) -> bytes:
        left_s = max(self._deadline - time.monotonic(), 0.05)
        # Rank 0 needs a moment to tell the others who is missing.
        left_s += 1.0 if self._rank else 0.0
        try:
            self._store.wait([key], timedelta(seconds=left_s))
        except RuntimeError as error:  # a plain one in the case of a file store
            if time.monotonic() < self._deadline:
                raise PeerLost(f"the store where the group's ranks meet failed: {error}", rank=self._rank, peer=0) from error
            raise self._lost([peer]) from None
        return self._store.get(key)

    def _lost(self, missing: list[int]) -> PeerLost:
        names = ", ".join(map(str, missing))
        return PeerLost(
            f"rank {names} of {self._world_size} did not join the group within {self._timeout_s:g} s: does each of them make "
            "this group, and did its process start? SQUINCH_CONNECT_TIMEOUT sets the patience",
            rank=self._rank,
            peer=missing[0],
        )


def _store_address(store: Store) -> str | None:
    """Where the job's store is, "tcp://host:port": peers reach this rank by the address it has on the way there."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return f"tcp://{store.host}:{store.port}"
    return None
