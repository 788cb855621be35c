"""Ranks as real processes, for faults that threads cannot have. The test itself is rank 0."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from squinchcomm.transport.base import Transport
from squinchcomm.transport.options import TransportOptions
from squinchcomm.transport.registry import get_backend


@contextmanager
def world(world_size: int, body: str, **options: Any) -> Iterator[tuple[Transport, list[Any], list[Connection]]]:
    """Rank 0's transport, the processes of the other ranks and pipes to them. `body` names a function of this module."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    listener = get_backend("zmq", TransportOptions(**options)).listen()
    transport = None
    try:
        for rank in range(1, world_size):
            near, far = context.Pipe()
            process = context.Process(target=_main, args=(rank, far, body, options))
            process.start()
            far.close()
            pipes.append(near)
            processes.append(process)
        addresses = [listener.address, *(pipe.recv() for pipe in pipes)]
        for pipe in pipes:
            pipe.send(addresses)
        transport = listener.connect(0, addresses, 10.0)
        yield transport, processes, pipes
    finally:
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        if transport is not None:
            transport.close(0.2)
        for pipe in pipes:
            pipe.close()


def _main(rank: int, pipe: Connection, body: str, options: dict[str, Any]) -> None:
    listener = get_backend("zmq", TransportOptions(**options)).listen()
    pipe.send(listener.address)
    transport = listener.connect(rank, pipe.recv(), 10.0)
    globals()[body](transport, pipe)


def report_losses(transport: Transport, pipe: Connection) -> None:
    """Sends (peer, reason, time) for each peer that is lost, for ever."""
    pipe.send("ready")
    known: set[int] = set()
    while True:
        transport.recv(1.0)
        for peer in set(transport.lost) - known:
            known.add(peer)
            pipe.send((peer, transport.lost[peer], time.time()))


def send_and_wait(transport: Transport, pipe: Connection) -> None:
    """Fills the window to rank 0, then waits to be killed."""
    number = 0
    while transport.can_send(0):
        transport.send(0, number.to_bytes(4, "little"), bytes(300_000), borrow=True)
        number += 1
    transport.flush(5.0)
    pipe.send("ready")
    time.sleep(60)


def leave_without_closing(transport: Transport, pipe: Connection) -> None:
    """Ends the interpreter with an open transport that has sent large frames."""
    transport.send(0, b"last words", bytes(1 << 20))
    time.sleep(0.3)
    pipe.send("ready")
