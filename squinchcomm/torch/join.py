"""The ranks of a group find each other through torch's store.

1. Each rank puts into the store which ranks it takes the group to have. Rank 0 adds a fresh job token and a fresh key pair; others take
   those, and compare.
2. Each rank opens its listeners and puts their addresses into the store.
3. Rank 0 puts everybody's addresses, or the reason why there will be none, into one entry that the others wait for.

Entries carry the number of the round, counted by each rank, so that a group that is made again does not find old ones, and ranks'
numbers in the default group: ranks that make different groups at the same time use one part of the store.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from squinchcomm.bootstrap import transport_options
from squinchcomm.communicator import Communicator
from squinchcomm.config import Config, configure_logging
from squinchcomm.errors import MismatchError, PeerLost
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


class _View(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What one rank knows of the group at first; `secret` is rank 0's."""

    members: Annotated[list[int], msgspec.Meta(max_length=_MAX_WORLD)]
    secret: _Secret | None = None


class _Outcome(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    blobs: Annotated[list[_Blob], msgspec.Meta(max_length=_MAX_WORLD)]
    missing: list[int]
    mismatch: str


def join_group(store: Store, rank: int, members: Sequence[int], config: Config) -> Communicator:
    """Makes the communicator of a group whose ranks share `store`.

    Args:
        store: Of the group, and of groups that other ranks make at the same time.
        rank: Of this process in the group.
        members: Ranks of the group, by their numbers in the default group.
        config: Settings.

    Raises:
        PeerLost: a rank did not come within `config.connect_timeout_s`; names it.
        MismatchError: ranks take the group to have different members, or disagree on settings.
        ConfigError: settings that make no group.
    """
    configure_logging(config.debug, rank)
    world_size = len(members)
    if world_size == 1:
        return join(get_backend("inproc"), 0, lambda blob: [blob], config)
    meeting = _Meeting(store, rank, members, config.connect_timeout_s)
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

    def __init__(self, store: Store, rank: int, members: Sequence[int], timeout_s: float) -> None:
        self._rank, self._members = rank, list(members)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._store = store
        self._round = f"squinch/{store.add(f'squinch/rounds/{members[rank]}', 1)}"

    def share_secret(self) -> _Secret:
        if self._rank == 0:
            key = generate_key()
            made = _Secret(secrets.token_hex(16), key.public, key.secret)
            self._put("view", 0, _View(self._members, made))
            return made
        self._put("view", self._rank, _View(self._members))
        first = self._view(0)
        if first.secret is None or first.members != self._members:
            raise self._mismatch(_different(self._members, self._rank, first.members, 0), 0)
        return first.secret

    def exchange(self, blob: bytes) -> list[bytes]:
        if self._rank == 0:
            outcome = self._collect(blob)
            self._put("all", 0, outcome)
        else:
            self._put("address", self._rank, blob)
            outcome = msgspec.msgpack.decode(self._take("all", 0), type=_Outcome)
        if outcome.mismatch:
            raise self._mismatch(outcome.mismatch, None)
        if outcome.missing:
            raise self._lost(outcome.missing)
        return list(outcome.blobs)

    def _collect(self, own: bytes) -> _Outcome:
        blobs, missing = [own], []
        for peer in range(1, len(self._members)):
            try:
                view = self._view(peer)
                if view.members != self._members:
                    return _Outcome([], [], _different(self._members, 0, view.members, view.members.index(self._members[peer])))
                blobs.append(msgspec.msgpack.decode(self._take("address", peer), type=_Blob))
            except PeerLost:
                missing.append(peer)
        return _Outcome([] if missing else blobs, missing, "")

    def _view(self, peer: int) -> _View:
        return msgspec.msgpack.decode(self._take("view", peer), type=_View)

    def _entry(self, what: str, peer: int) -> str:
        return f"{self._round}/{what}/{self._members[peer]}"

    def _put(self, what: str, rank: int, value: object) -> None:
        self._store.set(self._entry(what, rank), msgspec.msgpack.encode(value))  # type: ignore[arg-type]  # its stub says str

    def _take(self, what: str, peer: int) -> bytes:
        key = self._entry(what, peer)
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
            f"rank {names} of {len(self._members)} did not join the group within {self._timeout_s:g} s: does each of them make "
            "this group, and did its process start? SQUINCH_CONNECT_TIMEOUT sets the patience",
            rank=self._rank,
            peer=missing[0],
        )

    def _mismatch(self, text: str, peer: int | None) -> MismatchError:
        return MismatchError(
            f"ranks make different groups: {text}. All ranks must make the same groups, in the same order",
            rank=self._rank,
            peer=peer,
        )


def _different(members: Sequence[int], rank: int, others: Sequence[int], peer: int) -> str:
    """Two ranks' ideas of a group, by their numbers in the default group."""
    return " / ".join(f"rank {group[place]} one of {_some(group)}" for group, place in ((members, rank), (others, peer)))


def _some(members: Sequence[int]) -> str:
    shown = ", ".join(map(str, members[:8]))
    return f"{len(members)} ranks ({shown}{', ...' if len(members) > 8 else ''})"


def _store_address(store: Store) -> str | None:
    """Where the job's store is, "tcp://host:port": peers reach this rank by the address it has on the way there."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return f"tcp://{store.host}:{store.port}"
    return None
