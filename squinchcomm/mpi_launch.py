"""Ranks that meet through MPI: who they are, and what they must know of each other before they can connect."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import msgspec

from squinchcomm.config import Config
from squinchcomm.errors import ConfigError, MismatchError
from squinchcomm.launch import LaunchInfo, detect
from squinchcomm.transport.address import host_identity
from squinchcomm.transport.options import JobKey
from squinchcomm.transport.security import generate_key

if TYPE_CHECKING:
    from squinchcomm.transport.mpi_world import MpiWorld


_UNUSED_ADDRESS = "ipc://@mpi"  # so that nobody looks for one


class Greeting(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What each rank tells before anybody listens. `key` is rank 0's, made for a job that brought none."""

    host: str
    name: str
    transport: str
    key: tuple[str, str] | None


def wants_mpi(config: Config, comm: Any, info: LaunchInfo | None = None) -> bool:
    """Whether ranks meet through MPI: they use it anyway, or a launcher of MPI gave no other place to meet."""
    if comm is not None or config.transport == "mpi":
        return True
    return info is not None and info.source in ("openmpi", "mpich") and info.world_size > 1 and info.address is None


def enter(comm: Any, rank: int | None, world_size: int | None, timeout_s: float) -> tuple[MpiWorld, LaunchInfo]:
    """This process's world in MPI, and its place there.

    Raises:
        ConfigError: there is no MPI here, it is unfit, or it disagrees with the arguments or with the launcher.
        PeerLost: not all ranks of `comm` came in time.
    """
    try:
        from squinchcomm.transport.mpi_world import join_world
    except ImportError as error:
        raise ConfigError(str(error)) from error
    world = join_world(comm, timeout_s)
    if rank is not None and (rank, world_size) != (world.rank, world.size):
        raise ConfigError(
            f"rank={rank} and world_size={world_size} were given, but MPI says rank {world.rank} of {world.size}; leave them out"
        )
    if comm is not None:
        return world, LaunchInfo(world.rank, world.size, 0, 1, None, "", "an MPI communicator")
    told = detect(address=_UNUSED_ADDRESS)
    if told.world_size != world.size:
        raise ConfigError(
            f"{told.source} says there are {told.world_size} ranks, but MPI has {world.size}: with the mpi transport start ranks "
            f"with `mpirun -n {max(told.world_size, world.size)}`, using the mpirun of the MPI library that mpi4py loads"
        )
    return world, LaunchInfo(
        world.rank, world.size, told.local_rank, told.local_world_size, None, told.job_token, f"MPI ({told.source})"
    )


def greet(world: MpiWorld, config: Config, timeout_s: float) -> tuple[str | None, JobKey | None]:
    """A place on the way to another host, as an address (None if all ranks share one), and the key that rank 0 made for the job.

    Raises:
        MismatchError: ranks were told different transports.
    """
    key = generate_key() if world.rank == 0 and config.security != "none" and config.key_file is None else None
    own = Greeting(
        config.host or host_identity(),
        socket.gethostname(),
        config.transport,
        (key.public, key.secret) if key is not None else None,
    )
    blobs = world.exchange(msgspec.msgpack.encode(own), timeout_s)
    everybody = [msgspec.msgpack.decode(blob, type=Greeting) for blob in blobs]
    for peer, each in enumerate(everybody):
        if each.transport != everybody[0].transport:
            raise MismatchError(
                f"ranks must agree on transport: rank 0 has {everybody[0].transport}, rank {peer} has {each.transport}",
                rank=world.rank,
                peer=peer,
            )
    shared = everybody[0].key
    made = JobKey(*shared) if shared is not None and config.key_file is None else None
    elsewhere = next((each.name for each in everybody if each.host != own.host), None)
    # The port does not matter: the address is only asked for the route to it.
    return None if elsewhere is None else f"tcp://{elsewhere}:9", made
