"""Ranks that can tell each other something become a communicator: they listen, exchange where, connect, and agree on settings."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from squinchcomm import metrics
from squinchcomm.collectives.coder import mix
from squinchcomm.collectives.survivors import Assembly
from squinchcomm.communicator import Communicator
from squinchcomm.config import Config
from squinchcomm.crossover import Crossover
from squinchcomm.errors import MismatchError, WireFormatError
from squinchcomm.policy import AUTO
from squinchcomm.survey import places, survey
from squinchcomm.transport.base import Backend, Listener, Transport

log = logging.getLogger("squinchcomm")

_MAX_BLOB_BYTES = 64 << 10

# Ranks connect once all have told where they listen, so one that cannot be reached is gone. For each rank a little more: many on
# few cores take turns.
_REACH_S, _REACH_PER_RANK_S = 4.0, 0.05


class Endpoints(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Where one rank can be reached, and the settings on which ranks must agree."""

    collectives: bytes
    messages: bytes
    epoch: int
    settings: dict[str, str]


def join(backend: Backend, rank: int, exchange: Callable[[bytes], list[bytes]], config: Config) -> Communicator:
    """Makes a communicator over `backend`; `exchange` gives every rank everybody's blob, in rank order.

    Raises:
        PeerLost: a rank died, or cannot be reached, within about 5 s of the exchange (or `connect_timeout_s` if that is less).
        MismatchError: ranks disagree on settings or versions.
    """
    listeners = _listen(backend)
    try:
        blobs = exchange(_pack(listeners, secrets.randbits(32), config))
        return _connect(backend, listeners, rank, blobs, config)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise


def split(comm: Communicator, backend: Backend, epoch: int, color: int | None, key: int | None) -> Communicator | None:
    """See `Communicator.split`; `epoch` is the new communicators'."""
    color, key = _small_integer(color, "color"), _small_integer(key, "key")
    if color is not None and color < 0:
        raise ValueError(f"color must be None or an integer from 0 to 2**31 - 1, not {color}")
    order = comm.rank if key is None else key
    if color is None:
        _members(comm, None, order, b"")
        return None
    listeners = _listen(backend)
    try:
        members = _members(comm, color, order, _pack(listeners, epoch, comm.config))
        new_rank = [rank for rank, _ in members].index(comm.rank)
        return _connect(backend, listeners, new_rank, [blob for _, blob in members], comm.config, comm.crossover)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise


def shrink(
    comm: Communicator, backend: Backend, transport: Transport, epoch: int, attempt: int, timeout_s: float
) -> Communicator:
    """See `Communicator.shrink`; `transport` is the one that the broken communicator's collectives used."""
    listeners = _listen(backend)
    try:
        new_epoch = mix(epoch, (1 << 40) + attempt) & 0xFFFFFFFF
        blobs = Assembly(transport, epoch, attempt, _pack(listeners, new_epoch, comm.config)).agree(timeout_s)
        members = sorted(blobs)
        return _connect(
            backend, listeners, members.index(comm.rank), [blobs[rank] for rank in members], comm.config, comm.crossover
        )
    except BaseException:
        for listener in listeners:
            listener.close()
        raise


def _members(comm: Communicator, color: int | None, order: int, blob: bytes) -> list[tuple[int, bytes]]:
    """Tells all ranks of `comm` what this one has; rank and blob of those with its color, in their order in the new group."""
    rows = _exchange(comm, msgspec.msgpack.encode((color, order, blob)))
    entries = [msgspec.msgpack.decode(row, type=tuple[int | None, int, bytes]) for row in rows]
    ranks = [rank for rank, entry in enumerate(entries) if entry[0] == color]
    return [(rank, entries[rank][2]) for rank in sorted(ranks, key=lambda rank: (entries[rank][1], rank))]


def _exchange(comm: Communicator, blob: bytes) -> list[bytes]:
    sizes = np.zeros(comm.world_size, np.int64)
    comm.all_gather(sizes, np.array([len(blob)], np.int64))
    if sizes.min() < 0 or sizes.max() > _MAX_BLOB_BYTES:
        raise WireFormatError(
            f"split: ranks say they send {sizes.tolist()} bytes; {_MAX_BLOB_BYTES} is the most", rank=comm.rank
        )
    rows = np.zeros(int(sizes.sum()), np.uint8)
    comm.all_gather(rows, np.frombuffer(blob, np.uint8), counts=sizes.tolist())
    return [part.tobytes() for part in np.split(rows, np.cumsum(sizes)[:-1])]


def _small_integer(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not -(1 << 31) <= value < 1 << 31:
        raise ValueError(f"{name} must be None or an integer of 32 bits, not {value!r}")
    return int(value)


def _listen(backend: Backend) -> tuple[Listener, Listener]:
    """Opens the two places where a rank of a new communicator is reached: for collectives and for messages."""
    collectives = backend.listen()
    try:
        return collectives, backend.listen()
    except BaseException:
        collectives.close()
        raise


def _pack(listeners: tuple[Listener, Listener], epoch: int, config: Config) -> bytes:
    """What a rank tells the others before a communicator exists."""
    collectives, messages = listeners
    settings = {"chunk_bytes": str(config.chunk_bytes), "algorithm": config.algorithm, "codec": "any but auto"}
    if config.codec == AUTO:  # its ranks measure together, and decide alike
        settings |= {"codec": AUTO, "link_rate": str(config.link_rate)}
    return msgspec.msgpack.encode(Endpoints(collectives.address, messages.address, epoch, settings))


def _connect(
    backend: Backend,
    listeners: tuple[Listener, Listener],
    rank: int,
    blobs: Sequence[bytes],
    config: Config,
    known: Crossover | None = None,
) -> Communicator:
    """Connects this rank's listeners with those of `blobs`, one a rank, whose epoch is rank 0's.

    What a larger group has measured, `known`, holds for its parts.
    """
    everybody = [_read(blob, peer) for peer, blob in enumerate(blobs)]
    _check_settings(everybody, rank)
    collectives, messages = listeners
    reach_s = min(config.connect_timeout_s, _REACH_S + _REACH_PER_RANK_S * len(blobs))
    first = collectives.connect(rank, [each.collectives for each in everybody], reach_s)
    try:
        second = messages.connect(rank, [each.messages for each in everybody], reach_s)
    except BaseException:
        first.close(0.0)
        raise
    comm = Communicator(backend, (first, second), config, everybody[0].epoch)
    try:
        # Nobody goes on, and perhaps away, before everybody is connected.
        comm.barrier(timeout_s=config.connect_timeout_s)
        if config.codec == AUTO and comm.world_size > 1:
            comm.crossover = survey(comm) if known is None else known.of(places(comm))
            log.info("codec auto: %r", comm.crossover)
    except BaseException:
        comm.close()
        raise
    comm.stats.clear()
    metrics.start(config)
    return comm


def _check_settings(everybody: Sequence[Endpoints], rank: int) -> None:
    for peer, theirs in enumerate(everybody):
        for name, value in everybody[0].settings.items():
            if theirs.settings.get(name) != value:
                raise MismatchError(
                    f"ranks must agree on {name}: rank 0 has {value}, rank {peer} has {theirs.settings.get(name)}",
                    rank=rank,
                    peer=peer,
                )


def _read(blob: bytes, peer: int) -> Endpoints:
    try:
        return msgspec.msgpack.decode(blob, type=Endpoints)
    except msgspec.MsgspecError as error:
        raise MismatchError(f"rank {peer} runs another version of squinchcomm: {error}", peer=peer) from None
