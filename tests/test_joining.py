"""A rank that dies while a group is made is lost to the others within seconds, long before `connect_timeout_s`."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import threading
import time

import pytest

from squinchcomm.config import Config
from squinchcomm.errors import PeerLost
from squinchcomm.joining import join
from squinchcomm.transport.inproc import InprocRendezvous
from squinchcomm.transport.options import TransportOptions
from squinchcomm.transport.registry import get_backend
from squinchcomm.transport.rendezvous import exchange


def test_a_rank_that_gives_up_after_the_exchange_is_lost_to_the_others() -> None:
    rendezvous = InprocRendezvous(3)
    results: dict[int, tuple[BaseException, float]] = {}
    options = TransportOptions(scheme="tcp")

    def rank_main(rank: int) -> None:
        def exchange_and_die(blob: bytes) -> list[bytes]:
            blobs = rendezvous.exchange(rank, blob, 20.0)
            if rank == 2:
                raise ZeroDivisionError("and its listeners close")
            time.sleep(0.2)
            return blobs

        started = time.monotonic()
        try:
            join(get_backend("zmq", options), rank, exchange_and_die, Config(connect_timeout_s=60.0)).close()
        except BaseException as error:
            results[rank] = error, time.monotonic() - started

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    for rank in (0, 1):
        error, took_s = results[rank]
        assert isinstance(error, PeerLost) and error.peer == 2, results
        assert "cannot reach rank 2" in str(error)
        assert took_s < 5.5


RANK = """
import json, os, signal, sys, time
import squinchcomm
from squinchcomm import joining

rank, address, when = int(sys.argv[1]), sys.argv[2], sys.argv[3]
real = joining._connect

def dies(*arguments):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    return real(*arguments)

if when == "init":
    joining._connect = dies
started = time.monotonic()
try:
    comm = squinchcomm.init(rank, 3, address)
    joining._connect = dies
    started = time.monotonic()
    comm.split(0)
except squinchcomm.PeerLost as error:
    print(json.dumps({"took_s": time.monotonic() - started, "peer": error.peer, "message": str(error)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["init", "split"])
def test_a_rank_killed_while_the_group_connects_is_lost_to_the_others(when: str) -> None:
    address = f"ipc://@squinchcomm-test-{secrets.token_hex(8)}"
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), address, when], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert ranks[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert ranks[rank].returncode == 0
        event = json.loads(outputs[rank])
        assert event["peer"] == 1, event
        assert event["took_s"] < 5.5 if when == "split" else event["took_s"] < 10.0, event


HOST = """
import sys
from squinchcomm.transport import rendezvous
from squinchcomm.transport.options import TransportOptions

answer = rendezvous._Host._answer
def told(self, who, message):
    answer(self, who, message)
    print("answered", flush=True)
rendezvous._Host._answer = told
rendezvous.exchange(sys.argv[1], 0, 3, b"", options=TransportOptions(), timeout_s=60.0)
"""


def test_a_rank_0_that_dies_while_others_are_missing_is_lost_to_those_who_came() -> None:
    address = f"ipc://@squinchcomm-test-{secrets.token_hex(8)}"
    host = subprocess.Popen([sys.executable, "-c", HOST, address], stdout=subprocess.PIPE, text=True)
    caught: list[tuple[BaseException, float]] = []

    def guest() -> None:
        try:
            exchange(address, 1, 3, b"", options=TransportOptions(), timeout_s=60.0)
        except PeerLost as error:
            caught.append((error, time.monotonic()))

    thread = threading.Thread(target=guest)
    thread.start()
    assert host.stdout.readline() == "answered\n"
    time.sleep(0.3)  # until the answer is read
    host.kill()
    killed_at = time.monotonic()
    host.communicate()
    thread.join(30.0)
    ((error, at),) = caught
    assert error.peer == 0 and "rank 0 ended while rank 2 had not come yet" in str(error)
    assert at - killed_at < 5.0
