"""All collectives and messages over encrypted TCP."""

from __future__ import annotations

import functools

import numpy as np

from squinchcomm.communicator import Communicator
from squinchcomm.transport.options import TransportOptions
from squinchcomm.transport.security import generate_key
from tests.conformance import collective_checks as checks
from tests.worlds import run_world

# Payloads must take the encrypted way, though the ranks could share memory.
OPTIONS = TransportOptions(scheme="tcp", security="curve", key=generate_key(), shared_memory=False)
WORLD = functools.partial(run_world, transport="zmq", options=OPTIONS)


def test_every_kind_of_call_works_encrypted() -> None:
    def encrypted(comm: Communicator) -> tuple[bool, ...]:
        return tuple(transport.encrypted for transport in comm._transports)

    assert WORLD(2, encrypted) == [(True, True)] * 2
    checks.check_allreduce(WORLD, 2, np.float32, "sum")
    checks.check_compressed_allreduce(WORLD, 2, "squinch6", np.float32, "avg", (1, 513, 100_003))
    checks.check_reduce(WORLD, 2)
    checks.check_reduce_scatter(WORLD, 2, None)
    checks.check_reduce_scatter(WORLD, 2, "squinch6")
    checks.check_all_gather(WORLD, 2, np.float32)
    checks.check_compressed_all_gather(WORLD, 2)
    checks.check_broadcast(WORLD, 2, np.float32)
    checks.check_gather_scatter(WORLD, 2)
    checks.check_all_to_all(WORLD, 2)
    checks.check_barrier(WORLD, 2)
    checks.check_async(WORLD, 2)
    checks.check_messages(WORLD, 2)


def test_groups_split_from_an_encrypted_one_are_encrypted() -> None:
    checks.check_split(WORLD, 2)

    def body(comm: Communicator) -> bool:
        with comm.split(0) as group:
            return all(transport.encrypted for transport in group._transports)

    assert WORLD(2, body) == [True, True]
