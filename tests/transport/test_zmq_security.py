"""Strangers at the door, wrong keys, and authenticated peers that talk nonsense."""

from __future__ import annotations

import functools
import logging
import os
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from squinchcomm.errors import ConfigError, PeerLost, WireFormatError
from squinchcomm.transport import security
from squinchcomm.transport.address import decode_address
from squinchcomm.transport.options import TransportOptions
from squinchcomm.transport.registry import get_backend
from squinchcomm.transport.security import choose_security, generate_key, generate_key_file, read_key_file
from tests.conformance import transport_checks as checks

KEY = generate_key()
PLAIN = {"scheme": "tcp", "job_token": "right"}
CURVE = {"scheme": "tcp", "security": "curve", "key": KEY}
connect = functools.partial(checks.connect_group, "zmq")


@contextmanager
def besieged(**options):
    """Two ranks, and the tcp endpoint of the first."""
    endpoints: list[str] = []
    sessions: list[int] = []

    def note(rank: int, address: bytes) -> bytes:
        endpoints.append(decode_address(address, rank).tcp)
        sessions.append(decode_address(address, rank).session)
        return address

    with checks.group(connect, 2, rewrite=note, **options) as (a, b):
        yield a, b, endpoints[0], sessions[0]


def await_rejection(transport, timeout_s: float = 2.0) -> None:
    deadline = time.monotonic() + timeout_s
    while transport.rejected_peers == 0:
        assert time.monotonic() < deadline, "the stranger was not counted"
        assert transport.recv(0.05) is None


@contextmanager
def stranger(endpoint: str, **settings_):
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.set(zmq.LINGER, 0)
    try:
        for name, value in settings_.items():
            push.set(getattr(zmq, name), value)
        push.connect(endpoint)
        for _ in range(3):
            push.send(b"let me in")
        yield push
    finally:
        push.close()
        context.term()


PUBLIC, SECRET = zmq.curve_keypair()
STRANGERS = {
    "no security": {},
    "no token": {"PLAIN_USERNAME": b"squinchcomm", "PLAIN_PASSWORD": b"x"},
    "other key": {"CURVE_SERVERKEY": KEY.public.encode(), "CURVE_PUBLICKEY": PUBLIC, "CURVE_SECRETKEY": SECRET},
}


@pytest.mark.parametrize("who", STRANGERS)
@pytest.mark.parametrize("options", [PLAIN, CURVE], ids=["plain", "curve"])
def test_strangers_never_reach_the_parser(options, who):
    with besieged(**options) as (a, b, endpoint, _):
        with stranger(endpoint, **STRANGERS[who]):
            await_rejection(a)
        b.send(0, b"the group goes on")
        assert checks.receive(a)[0].header == b"the group goes on"
        assert not a.lost


@pytest.mark.parametrize("options", [PLAIN, CURVE], ids=["plain", "curve"])
@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000, os.urandom(3000), b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL"]
)
def test_garbage_on_the_port_is_counted(options, garbage):
    with besieged(**options) as (a, b, endpoint, _):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(garbage)
            connection.settimeout(0.3)
            try:
                while connection.recv(1000):
                    pass
            except OSError:
                pass
        await_rejection(a)
        b.send(0, b"the group goes on")
        assert checks.receive(a)[0].header == b"the group goes on"


def test_silent_connection_is_dropped_after_the_handshake_time():
    with besieged(**PLAIN) as (a, _, endpoint, _):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            start = time.monotonic()
            await_rejection(a, 4.0)
            assert time.monotonic() - start > 2.0
            connection.settimeout(1.0)
            while connection.recv(1000):
                pass


def test_many_strangers_do_not_stop_the_group():
    with besieged(**PLAIN) as (a, b, endpoint, _):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        for _ in range(1500):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(b"\0" * 64)
        for _ in range(40):
            b.send(0, b"", bytes(100_000))
            checks.receive(a)[0].release()
            b.recv(0)
        a.recv(0.2)
        assert a.rejected_peers > 1000
        assert not a.lost


def test_strangers_who_came_before_the_group_are_not_taken_for_its_ranks():
    listeners = [get_backend("zmq", TransportOptions(**{**PLAIN, "scheme": "tcp"})).listen() for _ in range(2)]
    host, _, port = decode_address(listeners[0].address, 0).tcp.removeprefix("tcp://").rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(8)]
    time.sleep(0.1)
    for stranger in strangers:
        stranger.close()
    time.sleep(0.1)  # their descriptors are free now: the ranks' connections get the same numbers
    addresses = [listener.address for listener in listeners]
    with ThreadPoolExecutor(2) as pool:
        a, b = pool.map(lambda rank: listeners[rank].connect(rank, addresses, 5.0), range(2))
    for _ in range(8):
        assert a.recv(0.1) is None
        assert b.recv(0.1) is None
    assert not a.lost
    assert not b.lost
    assert a.rejected_peers == 8
    a.close()
    b.close()


@pytest.mark.parametrize("theirs", [{**PLAIN, "job_token": "wrong"}, {**CURVE, "key": generate_key()}], ids=["token", "key"])
def test_rank_with_another_secret_is_refused_by_name(theirs):
    ours = CURVE if "key" in theirs else PLAIN
    own, other = (get_backend("zmq", TransportOptions(**options)).listen() for options in (ours, theirs))
    with pytest.raises(PeerLost, match=r"cannot reach rank 1 .*: (it refused our key or token|.*handshake)") as caught:
        own.connect(0, [own.address, other.address], 1.0)
    assert caught.value.peer == 1
    other.close()


# --- peers with the right token

PREFIX = struct.Struct("<IIQIHBx")


def nonsense(session: int) -> dict[str, list[bytes]]:
    def prefix(
        sender: int = 1, released: int = 0, header: int = 0, kind: int = 0, session_: int = session, returned: int = 0
    ) -> bytes:
        return PREFIX.pack(session_, sender, released, returned, header, kind)

    return {
        "empty": [b""],
        "short prefix": [prefix()[:-1]],
        "rank out of range": [prefix(sender=2)],
        "huge rank": [prefix(sender=0xFFFFFFFF)],
        "our own rank": [prefix(sender=0)],
        "other session": [prefix(session_=session ^ 1)],
        "released what was not sent": [prefix(released=1)],
        "released the impossible": [prefix(released=(1 << 64) - 1)],
        "unknown kind": [prefix(kind=77)],
        "header longer than the message": [prefix(header=5) + b"1234"],
        "header too long": [prefix(header=5000) + bytes(5000)],
        "payload missing": [prefix(kind=1)],
        "payload in two parts": [prefix(kind=1), bytes(40_000), b"more"],
        "extra part": [prefix(), b"more"],
        "many extra parts": [prefix(), *([b"more"] * 50)],
        "first part too long": [prefix(kind=1) + b"x", bytes(40_000)],
        "payload in memory that is not shared": [prefix(kind=2) + struct.pack("<QQ", 0, 40_000)],
        "returned what was not lent": [prefix(returned=1)],
        "credit with a tail": [prefix(kind=3) + b"x"],
        "goodbye in two parts": [prefix(kind=4), b"x"],
    }


@contextmanager
def insider(transport, endpoint: str):
    """A PUSH socket with the job's token."""
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.set(zmq.LINGER, 0)
    choose_security(TransportOptions(**PLAIN), beyond_loopback=False).set_client(push)
    push.connect(endpoint)
    try:
        yield push
    finally:
        push.close()
        context.term()


@pytest.mark.parametrize("case", nonsense(0))
def test_nonsense_of_an_authenticated_peer_is_an_error(case):
    with besieged(**PLAIN) as (a, b, endpoint, session), insider(a, endpoint) as push:
        push.send_multipart(nonsense(session)[case])
        with pytest.raises(WireFormatError) as caught:
            checks.receive(a, 2, timeout_s=2.0)  # extra parts are judged after the frame that they follow
        assert caught.value.rank == 0
        assert caught.value.peer in (None, 1)
        if caught.value.peer == 1:
            assert a.lost == {1: "broke the transport protocol"}
            b.send(0, b"no longer believed")
        assert a.recv(0.1) is None


def test_more_frames_than_the_window_are_an_error():
    with besieged(**PLAIN, window=4) as (a, _, endpoint, session), insider(a, endpoint) as push:
        for _ in range(6):
            push.send(PREFIX.pack(session, 1, 0, 0, 0, 0))
        with pytest.raises(WireFormatError, match="window"):
            checks.receive(a, 6)


def test_message_beyond_the_limit_is_never_taken_in():
    with besieged(**PLAIN, max_payload_bytes=64 << 10) as (a, _, endpoint, session), insider(a, endpoint) as push:
        push.send(PREFIX.pack(session, 1, 0, 0, 0, 0) + bytes(1 << 20))
        assert a.recv(0.3) is None


def test_flood_of_an_authenticated_peer_is_bounded():
    """zmq itself stops reading from a peer that ignores the window."""
    with besieged(**PLAIN, window=4, max_payload_bytes=1 << 20) as (a, _, endpoint, session), insider(a, endpoint) as push:
        push.set(zmq.SNDHWM, 1)
        before = _resident_bytes()
        message = PREFIX.pack(session, 1, 0, 0, 0, 0) + bytes(1 << 20)
        sent = 0
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            try:
                push.send(message, zmq.NOBLOCK)
                sent += 1
            except zmq.Again:
                time.sleep(0.01)
        assert 24 <= sent < 60
        assert _resident_bytes() - before < 100 << 20
        with pytest.raises(WireFormatError, match="window"):
            checks.receive(a, 100)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_fuzzed_messages_never_do_worse_than_an_error():
    with besieged(**PLAIN, window=4096) as (a, _, endpoint, session), insider(a, endpoint) as push:

        @settings(max_examples=200, suppress_health_check=list(HealthCheck))
        @given(
            session_=st.sampled_from([session, 0]),
            sender=st.sampled_from([0, 1, 2]),
            released=st.integers(0, 3),
            header=st.integers(0, 40),
            kind=st.integers(0, 6),
            body=st.binary(max_size=60),
            parts=st.lists(st.binary(max_size=9), max_size=2),
        )
        def fuzz(session_, sender, released, header, kind, body, parts):
            push.send_multipart([PREFIX.pack(session_, sender, released, 0, header, kind) + body, *parts])
            try:
                frame = a.recv(0.5)
            except WireFormatError:
                return
            assert frame is None or len(frame.payload) <= 60

        fuzz()


# --- keys and settings


def test_key_file_is_private_and_read_back(tmp_path):
    path = tmp_path / "job.key"
    os.umask(old := os.umask(0))
    key = generate_key_file(path)
    assert os.umask(old) == old
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key_file(path) == key
    assert key.secret not in repr(key)
    assert key.secret not in repr(TransportOptions(key=key, job_token="hush"))
    assert "hush" not in repr(TransportOptions(job_token="hush"))
    with pytest.raises(FileExistsError):
        generate_key_file(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o644])
def test_key_file_that_others_can_read_is_refused(tmp_path, mode):
    generate_key_file(tmp_path / "job.key")
    (tmp_path / "job.key").chmod(mode)
    with pytest.raises(ConfigError, match=rf"others can read .*{mode:04o}.*chmod 600"):
        get_backend("zmq", TransportOptions(security="curve", key_file=tmp_path / "job.key")).listen()


@pytest.mark.parametrize("content", ["", "secret = short\n", "hello", "secret = " + "\x7f" * 40, "secret"])
def test_file_that_is_no_key_file_is_refused(tmp_path, content):
    path = tmp_path / "job.key"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(ConfigError, match="not a job key file"):
        read_key_file(path)


def test_missing_key_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"No such file.*squinchcomm keygen"):
        read_key_file(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"directory|regular"):
        read_key_file(tmp_path)


def test_beyond_loopback_encryption_is_due():
    with pytest.raises(ConfigError, match=r"squinchcomm keygen.*SQUINCH_SECURITY=none"):
        choose_security(TransportOptions(), beyond_loopback=True)
    assert choose_security(TransportOptions(key=KEY), beyond_loopback=True).mechanism == "curve"
    assert choose_security(TransportOptions(key=KEY), beyond_loopback=False).mechanism == "plain"
    with pytest.raises(ConfigError, match="needs a job key"):
        choose_security(TransportOptions(security="curve"), beyond_loopback=False)


def test_plain_text_beyond_loopback_is_logged(caplog):
    security._warn_of_plain_text.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert choose_security(TransportOptions(security="none"), beyond_loopback=True).mechanism == "plain"
    assert "SECURITY" in caplog.text
