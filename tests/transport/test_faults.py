"""Links that are slow, cut, silent or lying; each test proves that its fault happened."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from squinchcomm.errors import WireFormatError
from squinchcomm.transport.address import decode_address, encode_address
from squinchcomm.transport.base import Transport
from squinchcomm.transport.security import generate_key
from tests.conformance import transport_checks as checks
from tests.conformance.faults import Proxy, Toxics

KEY = generate_key()


@contextlib.contextmanager
def proxied(toxics: Toxics, **options: Any) -> Iterator[tuple[Transport, Transport, Proxy]]:
    """Two ranks; what rank 0 sends to rank 1 passes a proxy, the other way is direct."""
    with contextlib.ExitStack() as stack:
        proxies: list[Proxy] = []

        def rewrite(rank: int, blob: bytes) -> bytes:
            if rank == 0:
                return blob
            address = decode_address(blob, rank)
            proxies.append(stack.enter_context(Proxy("127.0.0.1", int(address.tcp.rpartition(":")[2]), toxics)))
            return encode_address(msgspec.structs.replace(address, tcp=f"tcp://127.0.0.1:{proxies[0].port}"))

        connect = functools.partial(checks.connect_group, "zmq", rewrite=rewrite)
        a, b = stack.enter_context(checks.group(connect, 2, scheme="tcp", **options))
        yield a, b, proxies[0]


@pytest.mark.parametrize(
    ("toxics", "fault"),
    [
        (Toxics(latency_s=0.02), "latency"),
        (Toxics(slice_bytes=700), "slice"),
        (Toxics(bytes_per_s=4e6), "bandwidth"),
    ],
    ids=["latency", "slicer", "bandwidth"],
)
def test_slow_links_only_delay(toxics, fault):
    with proxied(toxics, peer_timeout_s=1.0) as (a, b, _):
        for number in range(8):
            a.send(1, bytes([number]), bytes([number]) * 100_000)
        for number, frame in enumerate(checks.receive(b, 8)):
            assert frame.header == bytes([number])
            assert frame.payload == bytes([number]) * 100_000
            frame.release()
        assert not a.lost
        assert not b.lost
    assert toxics.fired[fault] > 5


def test_reset_connection_is_a_loss_on_both_sides_at_once():
    with proxied(Toxics()) as (a, b, proxy):
        a.send(1, b"before")
        checks.receive(b)
        assert proxy.reset() == 2
        assert checks.await_loss(a, 1, 1.0) < 0.5
        assert checks.await_loss(b, 0, 1.0) < 0.5
        assert a.lost == {1: "connection closed"}
        assert b.lost == {0: "connection to us reset, or no sign of life for 5.0 s"}
        assert proxy.toxics.fired["reset"] == 2


def test_black_hole_is_a_loss_on_both_sides_within_the_peer_timeout():
    toxics = Toxics()
    with proxied(toxics, peer_timeout_s=1.0) as (a, b, _):
        a.send(1, b"before")
        checks.receive(b)
        toxics.black_hole = True
        start = time.monotonic()
        checks.await_loss(a, 1, 2.0)
        checks.await_loss(b, 0, 2.0)
        assert 0.4 < time.monotonic() - start < 1.5
        assert a.lost == {1: "no sign of life for 1.0 s"}
    assert toxics.fired["black_hole"] > 0


@pytest.mark.parametrize("security", ["plain", "curve"])
def test_corrupted_stream_never_crashes_and_is_never_believed_when_encrypted(security):
    toxics = Toxics(corrupt_every=9973, spare_bytes=4000)
    options = {"security": "curve", "key": KEY} if security == "curve" else {}
    with proxied(toxics, peer_timeout_s=1.0, **options) as (a, b, _):
        good = wrong = 0
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline and not b.lost:
            if a.can_send(1):
                a.send(1, b"header", b"\5" * 50_000)
            try:
                frame = b.recv(0.05)
            except WireFormatError:
                continue
            if frame is not None:
                frame.release()
                intact = frame.header == b"header" and frame.payload == b"\5" * 50_000
                good, wrong = good + intact, wrong + (not intact)
            with contextlib.suppress(WireFormatError):
                a.recv(0)
        assert toxics.fired["corrupt"] > 0
        if security == "curve":
            assert wrong == 0, "changed bytes must not pass encryption"
            # A changed length makes the stream stall: then it is silence that ends it.
            deadline = time.monotonic() + 4.0
            while not b.lost and time.monotonic() < deadline:
                b.recv(0.1)
            assert 0 in b.lost


@pytest.mark.root
def test_partition_is_a_loss_within_the_peer_timeout():
    """Two network namespaces on a veth pair, whose one end goes down."""
    import sys

    names = [f"sqt{time.monotonic_ns() % 100_000}{side}" for side in "ab"]
    try:
        for command in (
            *(f"ip netns add {name}" for name in names),
            f"ip link add {names[0]} netns {names[0]} type veth peer name {names[1]} netns {names[1]}",
            *(f"ip -n {name} addr add 10.231.7.{number}/24 dev {name}" for number, name in enumerate(names, 1)),
            *(f"ip -n {name} link set {name} up" for name in names),
            *(f"ip -n {name} link set lo up" for name in names),
        ):
            subprocess.run(command.split(), check=True)
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-m", "tests.transport.partitioned", str(rank)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(names)
        ]
        try:
            assert [process.stdout.readline() for process in processes] == [
                "talking tcp://10.231.7.2\n",
                "talking tcp://10.231.7.1\n",
            ]
            subprocess.run(["ip", "-n", names[1], "link", "set", names[1], "down"], check=True)
            cut = time.time()
            for rank, process in enumerate(processes):
                peer, when, reason = process.stdout.readline().split(maxsplit=2)
                assert (int(peer), reason) == (1 - rank, "no sign of life for 1.5 s\n")
                assert 0.5 < float(when) - cut < 1.7
        finally:
            for process in processes:
                process.kill()
                process.wait()
                process.stdout.close()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
