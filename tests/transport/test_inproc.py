"""Threads of one process."""

from __future__ import annotations

import functools
import gc
import threading

import pytest

from squinchcomm.errors import ConfigError, PeerLost
from squinchcomm.transport.inproc import InprocRendezvous
from squinchcomm.transport.options import TransportOptions
from squinchcomm.transport.registry import get_backend
from tests.conformance import transport_checks as checks

connect = functools.partial(checks.connect_group, "inproc")


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_contract(check):
    check(connect)


def test_listener_can_be_given_up():
    checks.check_listener_can_be_given_up(connect, "inproc")


def test_forgotten_transport_is_a_lost_peer():
    a, b = connect(2)
    del a
    gc.collect()
    assert checks.await_loss(b, 0, 1.0) < 0.5
    assert b.lost[0] == "connection closed"
    b.close()


def test_closed_listener_is_a_lost_peer():
    one, other = (get_backend("inproc").listen() for _ in range(2))
    other.close()
    with pytest.raises(PeerLost) as caught:
        one.connect(0, [one.address, other.address], 1.0)
    assert caught.value.peer == 1


def test_no_link_to_limit():
    with pytest.raises(ConfigError, match="no link"):
        get_backend("inproc", TransportOptions(link_rate=1e9))


def test_rendezvous_goes_round_after_round():
    rendezvous = InprocRendezvous(3)
    seen: list[list[bytes]] = []

    def body(rank: int) -> None:
        for round_ in range(50):
            seen.append(rendezvous.exchange(rank, b"%d/%d" % (rank, round_), 5.0))

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(tuple, seen)) == sorted(
        3 * [tuple(b"%d/%d" % (rank, round_) for rank in range(3)) for round_ in range(50)]
    )


def test_rendezvous_names_who_is_missing():
    with pytest.raises(PeerLost, match="ranks 1, 2"):
        InprocRendezvous(3).exchange(0, b"", 0.1)
