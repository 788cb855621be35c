"""Groups of ranks for tests: threads of this process, over any transport."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from squinchcomm.communicator import Communicator
from squinchcomm.config import Config
from squinchcomm.joining import join
from squinchcomm.transport.inproc import InprocRendezvous
from squinchcomm.transport.options import TransportOptions
from squinchcomm.transport.registry import get_backend
from tests.conformance.faulty import Damage, FaultyBackend

WORLD_SIZES = (1, 2, 3, 5, 8)


def ones(count: int, dtype: Any = np.float32) -> np.ndarray:
    """An array for calls of which only the end matters."""
    return np.ones(count, dtype)


def run_world(
    world_size: int,
    body: Callable[[Communicator], Any],
    *,
    transport: str = "inproc",
    options: TransportOptions | None = None,
    hosts: Sequence[str] = (),
    **settings: Any,
) -> list[Any]:
    """Runs `body(comm)` on each of `world_size` ranks in threads of this process and returns what they return, in rank order.

    The first rank's exception is raised here after all ranks have ended.
    """
    results = outcomes(world_size, body, transport=transport, options=options, hosts=hosts, **settings)
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed:
        raise failed[0]
    return results


def outcomes(
    world_size: int,
    body: Callable[[Communicator], Any],
    *,
    transport: str = "inproc",
    options: TransportOptions | None = None,
    hosts: Sequence[str] = (),
    damage: dict[int, Damage] | None = None,
    **settings: Any,
) -> list[Any]:
    """As `run_world`, with a rank's exception in the place of its result; frames to a rank in `damage` pass through that.

    `hosts` says on which host each rank pretends to be.
    """
    config = Config(**settings)
    rendezvous = InprocRendezvous(world_size)
    results: list[Any] = [None] * world_size

    def rank_main(rank: int) -> None:
        try:
            own = options or TransportOptions()
            backend = get_backend(transport, dataclasses.replace(own, host=hosts[rank]) if hosts else own)
            if damage and rank in damage:
                backend = FaultyBackend(backend, damage[rank])
            comm = join(backend, rank, lambda blob: rendezvous.exchange(rank, blob, 20.0), config)
            try:
                results[rank] = body(comm)
            finally:
                comm.close()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,), name=f"rank{rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), f"{thread.name} hangs; so far: {results}"
    return results
