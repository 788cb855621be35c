"""From nothing to a communicator: who am I, where are the others."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from typing import Any

from squinchcomm.communicator import Communicator
from squinchcomm.config import Config, configure_logging
from squinchcomm.errors import ConfigError
from squinchcomm.joining import join
from squinchcomm.launch import LaunchInfo, detect
from squinchcomm.mpi_launch import enter, greet, wants_mpi
from squinchcomm.transport.base import Backend
from squinchcomm.transport.options import TransportOptions, parse_rate
from squinchcomm.transport.registry import get_backend

log = logging.getLogger("squinchcomm")

# Frames on the way to a rank from each peer: enough that sums follow contributions without a pause on a slow link, few enough
# that a lossless all-reduce of 64 MiB among 4 ranks takes less than half its size in extra memory.
_WINDOW = 8


def init(
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    *,
    comm: Any = None,
    config: Config | None = None,
    **settings: Any,
) -> Communicator:
    """Joins the group of ranks that this process was started in.

    Args:
        rank: This process's number; None asks the launcher's environment (`squinchcomm run`, torchrun, MPI, Slurm); without any
            the world has one rank.
        world_size: Number of ranks; as `rank`.
        address: Where rank 0 meets the others: "tcp://host:port", or "ipc://@name" on one machine; as `rank`.
        comm: An `mpi4py.MPI.Intracomm` whose ranks, all of which call this, form the group; a duplicate of it is used. Bytes travel
            over MPI unless a setting names another transport.
        config: Settings; None reads the SQUINCH_* environment.
        settings: Single settings by field name of `Config`, such as `codec="squinch6"`; they win over the environment.

    Raises:
        ConfigError: arguments, environment or settings that make no group; says which and what to do.
        PeerLost: a rank did not come within `connect_timeout_s`, or came and then died (noticed within about 5 s of the last one's
            coming).
    """
    if config is None:
        config = Config.from_env(**settings)
    elif settings:
        raise ConfigError(f"give config or single settings, not both: {', '.join(settings)}")
    info = None if wants_mpi(config, comm) else detect(rank, world_size, address)
    if info is None or wants_mpi(config, comm, info):
        return _init_over_mpi(comm, rank, world_size, config)
    configure_logging(config.debug, info.rank)
    log.info("rank %d of %d from %s, meeting at %s", info.rank, info.world_size, info.source, info.address)
    if info.world_size == 1:
        return join(get_backend("inproc"), 0, lambda blob: [blob], config)
    options = transport_options(config, info)
    backend = get_backend(config.transport, options)
    address = info.address
    if address is None:
        raise ConfigError(f"{info.world_size} ranks need an address to meet at: pass address, or set SQUINCH_ADDRESS")

    def exchange(blob: bytes) -> list[bytes]:
        from squinchcomm.transport.rendezvous import exchange as meet

        return meet(
            address,
            info.rank,
            info.world_size,
            blob,
            options=options,
            timeout_s=config.connect_timeout_s,
        )

    return join(backend, info.rank, exchange, config)


def _init_over_mpi(comm: Any, rank: int | None, world_size: int | None, config: Config) -> Communicator:
    """`init` where ranks meet through MPI, whatever carries their bytes."""
    timeout_s = config.connect_timeout_s
    if comm is not None and config.sources["transport"] == "default":
        config = replace(config, transport="mpi", sources={**config.sources, "transport": "argument"})
    world, info = enter(comm, rank, world_size, timeout_s)
    configure_logging(config.debug, info.rank)
    log.info("rank %d of %d from %s, meeting through MPI", info.rank, info.world_size, info.source)
    if info.world_size == 1:
        return join(get_backend("inproc"), 0, lambda blob: [blob], config)
    elsewhere, key = greet(world, config, timeout_s)
    options = transport_options(config, replace(info, address=elsewhere))
    if config.transport == "mpi":
        from squinchcomm.transport.mpi_backend import MpiBackend

        backend: Backend = MpiBackend(options, world)
    else:
        backend = get_backend(config.transport, options if key is None else replace(options, key=key))
    return join(backend, info.rank, lambda blob: world.exchange(blob, timeout_s), config)


def transport_options(config: Config, info: LaunchInfo) -> TransportOptions:
    """The part of the settings that transports know."""
    return TransportOptions(
        scheme=config.scheme,  # type: ignore[arg-type]
        bind=config.bind_address or _own_address(info.address),
        port_range=config.port_range,
        host=config.host,
        shared_memory=config.shared_memory,
        window=_WINDOW,
        peer_timeout_s=config.peer_timeout_s,
        security=config.security,  # type: ignore[arg-type]
        key_file=config.key_file,
        job_token=info.job_token,
        link_rate=None if config.link_rate is None else parse_rate(config.link_rate),
        io_threads=config.io_threads,
    )


def _own_address(meeting: str | None) -> str:
    """This machine's address on the way to where the ranks meet: what peers can reach it by, unless an interface is set."""
    if meeting is None or not meeting.startswith("tcp://"):
        return "127.0.0.1"
    host, _, port = meeting.removeprefix("tcp://").rpartition(":")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # datagrams: looks up the route, sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"no way to the meeting address {meeting}: {error}; check it, or set SQUINCH_INTERFACE") from None
