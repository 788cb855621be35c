"""After close, and after every failure, nothing is left: threads, files, sockets."""

from __future__ import annotations

import functools
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from squinchcomm.errors import ConfigError, PeerLost
from squinchcomm.transport.options import TransportOptions
from squinchcomm.transport.registry import get_backend
from squinchcomm.transport.rendezvous import exchange
from squinchcomm.transport.security import generate_key
from tests.conformance import transport_checks as checks

connect = functools.partial(checks.connect_group, "zmq")


def held() -> tuple[Counter[str], Counter[str]]:
    """Open files by kind and threads by name. pyzmq's own thread for sends without a copy lives until the process ends."""
    files: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            files[os.readlink(f"/proc/self/fd/{fd}").partition("[")[0].rstrip("0123456789")] += 1
        except OSError:
            pass
    return files, Counter(
        type(thread).__name__ for thread in threading.enumerate() if type(thread).__name__ != "GarbageCollectorThread"
    )


@pytest.fixture(autouse=True)
def nothing_is_left():
    with checks.group(connect, 2) as (a, _):  # starts pyzmq's thread
        a.send(1, b"", bytes(100_000))
    gc.collect()
    before = held()
    yield
    gc.collect()
    until = time.monotonic() + 1.0
    while held() != before and time.monotonic() < until:
        time.sleep(0.01)
    assert held() == before


@pytest.mark.parametrize(
    "options", [{}, {"scheme": "tcp"}, {"security": "curve", "key": generate_key()}, {"link_rate": 1e9}], ids=str
)
def test_after_close(options):
    for _ in range(5):
        with checks.group(connect, 4, **options) as ranks:
            for transport in ranks:
                transport.send((transport.rank + 1) % 4, b"", bytes(100_000), borrow=True)
            checks.receive(ranks[0])


def test_after_close_with_frames_that_nobody_took():
    a, b = connect(2)
    for _ in range(a.window):
        a.send(1, b"", bytes(1 << 20))
    start = time.monotonic()
    b.close(0.1)
    a.close(0.3)
    assert time.monotonic() - start < 1.0


def test_when_forgotten():
    a, b = connect(2)
    a.send(1, b"", bytes(1 << 20))
    del a, b
    gc.collect()


def test_when_a_listener_is_forgotten():
    get_backend("zmq").listen()
    gc.collect()


def test_after_a_refused_connect():
    own, other = get_backend("zmq").listen(), get_backend("zmq").listen()
    other.close()
    with pytest.raises(PeerLost):
        own.connect(0, [own.address, other.address], 0.2)
    own = get_backend("zmq").listen()
    with pytest.raises(ConfigError):
        own.connect(0, [own.address, b"nonsense"], 0.2)


def test_after_a_listen_that_failed():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError):
            get_backend("zmq", TransportOptions(port_range=(port, port))).listen()


def test_after_losing_a_peer():
    a, b, c = connect(3)
    b.close()
    checks.await_loss(a, 1, 1.0)
    a.close()
    checks.await_loss(c, 0, 1.0)
    c.close()


@pytest.mark.parametrize("address", ["ipc://@squinchcomm-leaks", "tcp://127.0.0.1:21399", "inproc://leaks"])
def test_after_a_rendezvous_that_failed(address):
    with pytest.raises(PeerLost):
        exchange(address, 0, 2, b"", options=TransportOptions(), timeout_s=0.2)
    with pytest.raises(PeerLost):
        exchange(address, 1, 2, b"", options=TransportOptions(), timeout_s=0.2)


SCRIPT = """
import sys, threading
from tests.conformance.transport_checks import connect_group
a, b = connect_group("zmq", 2)
a.send(1, b"", bytes(1 << 20))
if sys.argv[1] == "waiting":
    threading.Thread(target=b.recv, args=(60,), daemon=True).start()
    b = None
if sys.argv[1] == "cycle":
    a.me = a
if sys.argv[1] == "raising":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["plain", "waiting", "cycle", "raising"])
def test_interpreter_ends_without_close(how):
    result = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, timeout=20, check=False)
    assert result.returncode == (3 if how == "raising" else 0), result.stderr
    assert result.stderr == b""
