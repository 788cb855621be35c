"""The contract over ZeroMQ: Unix sockets, TCP, IPv6, encrypted, and through the rate limiter."""

from __future__ import annotations

import functools
import socket
import threading
import time

import msgspec
import pytest

from squinchcomm.errors import ConfigError, PeerLost
from squinchcomm.transport.address import Address, decode_address, encode_address
from squinchcomm.transport.options import TransportOptions
from squinchcomm.transport.registry import get_backend
from squinchcomm.transport.security import generate_key
from tests.conformance import transport_checks as checks

KEY = generate_key()
KINDS = {
    "ipc": {"scheme": "ipc"},
    "tcp": {"scheme": "tcp", "job_token": "secret"},
    "ipv6": {"scheme": "tcp", "bind": "::1"},
    "curve": {"scheme": "tcp", "security": "curve", "key": KEY},
    "paced": {"link_rate": 20e9},
}


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_contract(kind, check):
    check(functools.partial(checks.connect_group, "zmq", **KINDS[kind]))


def test_listener_can_be_given_up():
    checks.check_listener_can_be_given_up(functools.partial(checks.connect_group, "zmq"), "zmq")


def test_same_host_talks_over_ipc_and_other_hosts_over_tcp():
    blobs = [get_listener(host=host) for host in ("a", "a", "b")]
    first, second, third = (decode_address(listener.address, 0) for listener in blobs)
    for listener in blobs:
        listener.close()
    assert first.endpoint_from(second).startswith("ipc://@squinchcomm-")
    assert first.endpoint_from(third) is None, "loopback is no way to another host"
    far = msgspec.structs.replace(first, tcp="tcp://192.0.2.1:5000")
    assert far.endpoint_from(third) == "tcp://192.0.2.1:5000"
    assert far.endpoint_from(msgspec.structs.replace(second, uid=second.uid + 1)) == "tcp://192.0.2.1:5000"


def test_encrypted_says_so():
    with checks.group(functools.partial(checks.connect_group, "zmq"), 2, security="curve", key=KEY) as (a, _):
        assert a.encrypted
    with checks.group(functools.partial(checks.connect_group, "zmq"), 2) as (a, _):
        assert not a.encrypted


def test_hosts_are_as_told():
    listeners = [get_listener(host=host, bind="127.0.0.2", security="none") for host in ("a", "a")]
    blobs = [listener.address for listener in listeners]
    joined: list[object] = []
    threads = [threading.Thread(target=lambda r=rank: joined.append(listeners[r].connect(r, blobs, 5))) for rank in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [transport.hosts for transport in joined] == [("a", "a")] * 2
    [transport.close() for transport in joined]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"window": 7}, "window is 7 on rank 1 and 32 here"),
        ({"max_payload_bytes": 1 << 20}, "max_payload_bytes"),
        ({"security": "curve", "key": KEY}, "security is curve on rank 1"),
        ({"host": "elsewhere"}, "set bind"),
    ],
)
def test_addresses_that_no_group_can_have(theirs, message):
    own, other = get_listener(host="here"), get_listener(**{"host": "here", **theirs})
    with pytest.raises(ConfigError, match=message):
        own.connect(0, [own.address, other.address], 1.0)
    other.close()


@pytest.mark.parametrize("blob", [b"", b"\xc1", b"x" * 2000, b"\x99" + b"\x01" * 9])
def test_bytes_that_are_no_address(blob):
    own = get_listener()
    with pytest.raises(ConfigError, match="address of rank 1"):
        own.connect(0, [own.address, blob], 1.0)


@pytest.mark.parametrize("endpoint", ["tcp://example.com:80", "ipc:///tmp/x", "inproc://pyzmq.gc.01", "tcp://1.2.3.4:99x"])
def test_endpoints_that_no_squinchcomm_has(endpoint):
    listener = get_listener()
    address = decode_address(listener.address, 0)
    listener.close()
    forged = msgspec.structs.replace(address, tcp=endpoint, ipc=endpoint)
    with pytest.raises(ConfigError, match="no squinchcomm"):
        decode_address(encode_address(forged), 1)


def test_peer_that_is_gone_is_named():
    own, other = get_listener(), get_listener()
    other.close()
    start = time.monotonic()
    with pytest.raises(PeerLost, match="cannot reach rank 1 at ipc://") as caught:
        own.connect(0, [own.address, other.address], 0.5)
    assert caught.value.peer == 1
    assert time.monotonic() - start < 1.5


def test_unreachable_peer_is_named_in_time():
    own = get_listener(scheme="tcp")
    far = msgspec.structs.replace(decode_address(own.address, 0), tcp="tcp://192.0.2.1:9", host=own_host(own), session=1)
    start = time.monotonic()
    with pytest.raises(PeerLost, match=r"cannot reach rank 1 at tcp://192\.0\.2\.1:9"):
        own.connect(0, [own.address, encode_address(far)], 0.7)
    assert time.monotonic() - start < 1.7


def test_ports_come_from_the_range():
    listeners = [get_listener(scheme="tcp", port_range=(21310, 21311)) for _ in range(2)]
    ports = {decode_address(listener.address, 0).tcp.rpartition(":")[2] for listener in listeners}
    assert ports == {"21310", "21311"}
    with pytest.raises(ConfigError, match=r"from 21310 to 21311 are in use; choose another port_range"):
        get_listener(scheme="tcp", port_range=(21310, 21311))
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        ("192.0.2.77", "no network interface of this machine has the address"),
        ("0.0.0.0", "give that of one network interface"),
        ("no-such-host.invalid", "does not resolve"),
    ],
)
def test_interfaces_that_cannot_be_had(bind, message):
    with pytest.raises(ConfigError, match=message):
        get_listener(bind=bind, security="none")


def test_too_few_open_files_are_an_early_error(monkeypatch):
    own, other = get_listener(), get_listener()
    monkeypatch.setattr("resource.getrlimit", lambda _: (10, 10))
    with pytest.raises(ConfigError, match=r"2 ranks need about 7 open files.*ulimit -n"):
        own.connect(0, [own.address, other.address], 1.0)
    other.close()
    with pytest.raises(ConfigError, match=r"listening needs about 15 open files.*ulimit -n"):
        get_listener()


def check_idle_receiver(seconds: float) -> None:
    with checks.group(functools.partial(checks.connect_group, "zmq"), 2, scheme="tcp", peer_timeout_s=1.0) as (a, b):
        while a.can_send(1):
            a.send(1, b"", bytes(1 << 20))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert a.recv(0.5) is None
        assert not a.lost
        assert len(checks.receive(b, a.window)) == a.window
        assert not b.lost


def test_idle_receiver_with_a_full_window_is_not_lost():
    check_idle_receiver(3.5)


@pytest.mark.slow
def test_idle_receiver_with_a_full_window_is_not_lost_for_long():
    check_idle_receiver(10.0)


def get_listener(**options):
    return get_backend("zmq", TransportOptions(**options)).listen()


def own_host(listener) -> str:
    address: Address = decode_address(listener.address, 0)
    return address.host


def test_send_buffers_are_short_on_short_ways():
    with checks.group(functools.partial(checks.connect_group, "zmq"), 3, scheme="tcp") as ranks:
        sizes = {
            link.kernel_socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            for transport in ranks
            for link in transport._links
            if link is not None
        }
    assert max(sizes) <= 2 << 20, "Linux doubles what is asked for"
