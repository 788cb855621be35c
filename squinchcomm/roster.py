"""The communicators of this process, so that metrics can be read of all of them together."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from dataclasses import dataclass
from typing import Protocol

from squinchcomm.config import Config
from squinchcomm.stats import Stats


class Member(Protocol):
    """What is read of a communicator."""

    rank: int
    world_size: int
    hosts: tuple[str, ...]
    config: Config
    stats: Stats

    @property
    def transport_name(self) -> str:
        """What carries its bytes."""

    @property
    def encrypted(self) -> bool:
        """Whether what it sends is encrypted."""

    @property
    def broken(self) -> bool:
        """Whether a call has failed."""

    @property
    def in_flight(self) -> int:
        """Number of collectives that are queued or running."""

    @property
    def connected_peers(self) -> int:
        """Number of other ranks that are not lost."""

    def counted(self) -> Stats:
        """Its counters, up to date."""


class ResidualHolder(Protocol):
    """Something that keeps residuals of error feedback."""

    def residual_norm(self) -> float:
        """Euclidean length of all its residuals."""


@dataclass(frozen=True)
class RankInfo:
    """Who this process is, as its oldest communicator in use knows it."""

    rank: int
    local_rank: int
    world_size: int
    transport: str
    node: str
    encrypted: bool


class _Roster:
    """Live communicators in the order in which they were made, and the sum of those that are gone."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.members: list[tuple[weakref.ref[Member], Stats]] = []
        self.gone = Stats()
        self.last: RankInfo | None = None
        self.codecs: set[str] = set()
        self.residuals: weakref.WeakKeyDictionary[ResidualHolder, str] = weakref.WeakKeyDictionary()


_roster = _Roster()


def enter(member: Member) -> None:
    """Takes a communicator in."""
    with _roster.lock:
        _roster.members.append((weakref.ref(member), member.stats))
        _roster.codecs.add(member.config.codec)
        if _roster.last is None or len(live()) == 1:
            _roster.last = _info_of(member)


def leave(member: Member) -> None:
    """Keeps what a communicator that is being closed has counted; idempotent."""
    with _roster.lock:
        _roster.last = rank_info()
        for entry in _roster.members:
            if entry[0]() is member:
                _roster.gone.add(member.counted())
                _roster.members.remove(entry)
                break


def live() -> list[Member]:
    """Communicators that are not closed; those that were dropped without `close` are added to the gone ones here."""
    found = []
    with _roster.lock:
        for entry in list(_roster.members):
            member = entry[0]()
            if member is None:
                _roster.gone.add(entry[1])
                _roster.members.remove(entry)
            else:
                found.append(member)
    return found


def totals() -> Stats:
    """What all communicators of this process have counted since it began: never less than before."""
    with _roster.lock:
        total = Stats()
        members = live()
        total.add(_roster.gone)
        for member in members:
            total.add(member.counted())
    return total


def rank_info() -> RankInfo | None:
    """Who this process is: by its oldest communicator that works, else its oldest, else the last one there was; None before any."""
    members = live()
    member = next((each for each in members if not each.broken), members[0] if members else None)
    return _roster.last if member is None else _info_of(member)


def connected_peers() -> int:
    """Ranks that are not lost to the communicator that `rank_info` speaks of."""
    members = live()
    return next((each.connected_peers for each in members if not each.broken), members[0].connected_peers if members else 0)


def codecs() -> set[str]:
    """Names of the codecs that communicators of this process were set to."""
    return set(_roster.codecs)


def hold_residuals(holder: ResidualHolder, codec: str) -> None:
    """Makes the residuals of error feedback with that codec known, for as long as `holder` lives."""
    _roster.residuals[holder] = codec


def residual_holders() -> list[tuple[ResidualHolder, str]]:
    """What `hold_residuals` was told of and still lives, with its codec."""
    return list(_roster.residuals.items())


def _info_of(member: Member) -> RankInfo:
    rank, hosts = member.rank, member.hosts
    return RankInfo(
        rank, _local_rank(rank, hosts), member.world_size, member.transport_name, socket.gethostname(), member.encrypted
    )


def _local_rank(rank: int, hosts: tuple[str, ...]) -> int:
    """What the launcher says, as whoever counts ports does; else the number of lower ranks on this host."""
    told = os.environ.get("LOCAL_RANK", "").strip()
    return int(told) if told.isdigit() else hosts[:rank].count(hosts[rank])


def _forget() -> None:
    """In a forked child: the communicators are the parent's, which counts them."""
    global _roster
    _roster = _Roster()


os.register_at_fork(after_in_child=_forget)
