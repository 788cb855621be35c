"""The emulated link."""

from __future__ import annotations

import functools
import threading
import time

import pytest

from squinchcomm.errors import ConfigError
from squinchcomm.transport.options import TransportOptions, parse_rate
from squinchcomm.transport.pacer import Pacer, acquire_pacer, release_pacer
from squinchcomm.transport.registry import get_backend
from tests.conformance import transport_checks as checks

connect = functools.partial(checks.connect_group, "zmq")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1Gbit", 1e9),
        ("100Mbit", 1e8),
        ("25Gb/s", 25e9),
        ("40Gbps", 40e9),
        ("2.5 Gbit/s", 2.5e9),
        ("800kbit", 8e5),
        ("9600b", 9600),
        ("1Tbit", 1e12),
    ],
)
def test_rates(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "1", "fast", "-1Gbit", "0Gbit", "1GB/s", "1 Gbyte", "1e9bit", "Gbit", "1gbit"])
def test_texts_that_are_no_rates(text):
    with pytest.raises(ConfigError, match="is not a rate"):
        parse_rate(text)


def test_bytes_get_a_hint():
    with pytest.raises(ConfigError, match="multiply by 8"):
        parse_rate("1GB/s")


@pytest.mark.parametrize(("frame_bytes", "frames"), [(1 << 20, 32), (64 << 10, 500), (4 << 10, 5000)])
def test_errors_do_not_add_up(frame_bytes, frames):
    pacer = Pacer(1e9)
    try:
        start = time.monotonic()
        for _ in range(frames):
            pacer.submit(frame_bytes, lambda: None)
        assert pacer.drain(10.0)
        late_s = time.monotonic() - start - frames * frame_bytes * 8 / 1e9
        assert -0.001 < late_s < 0.05
    finally:
        pacer.stop()


def test_bulk_takes_as_long_as_the_wire():
    with checks.group(connect, 2, link_rate=1e9, window=64) as (a, b):
        payload = bytes(1 << 20)
        start = time.monotonic()
        for _ in range(64):
            a.send(1, b"", payload)
        for frame in checks.receive(b, 64):
            frame.release()
        late_s = time.monotonic() - start - a.sent_bytes[1] * 8 / 1e9
        assert -0.005 < late_s < 0.1


def test_frame_leaves_when_its_last_byte_has():
    with checks.group(connect, 2, link_rate=100e6) as (a, b):
        start = time.monotonic()
        a.send(1, b"", bytes(1 << 20))
        checks.receive(b)
        assert 0.083 < time.monotonic() - start < 0.2


def test_link_is_shared_by_all_transports_of_the_process():
    with checks.group(connect, 2, link_rate=400e6) as (a, b), checks.group(connect, 2, link_rate=400e6) as (c, d):
        start = time.monotonic()
        for sender in (a, c):
            for _ in range(4):
                sender.send(1, b"", bytes(1 << 20))
        checks.receive(b, 4)
        checks.receive(d, 4)
        assert 0.165 < time.monotonic() - start < 0.35


def test_other_rate_in_the_same_process_is_refused():
    pacer = acquire_pacer(1e9)
    try:
        with pytest.raises(ConfigError, match="cannot be had too"):
            acquire_pacer(2e9)
    finally:
        release_pacer(pacer)


def test_borrowed_buffer_is_kept_until_it_has_left():
    with checks.group(connect, 2, link_rate=100e6) as (a, b):
        a.send(1, b"", bytes(1 << 20), borrow=True)
        assert not a.flush(0.02)
        assert a.flush(1.0)
        checks.receive(b)


def test_close_waits_for_the_link_as_long_as_it_may():
    with checks.group(connect, 2, link_rate=100e6) as (a, b):
        for _ in range(8):
            a.send(1, b"", bytes(1 << 20))
        start = time.monotonic()
        a.close(0.3)
        assert time.monotonic() - start < 0.8
        checks.receive(b, 2)
        checks.await_loss(b, 0, 1.0)


def test_idle_time_is_not_saved_up():
    pacer = Pacer(1e6)
    try:
        moments = []
        time.sleep(0.1)
        start = time.monotonic()
        for _ in range(3):
            pacer.submit(2500, lambda: moments.append(time.monotonic() - start))
        assert pacer.drain(1.0)
        assert moments == pytest.approx([0.02, 0.04, 0.06], abs=0.015)
    finally:
        pacer.stop()


def test_no_limit_no_thread():
    with checks.group(connect, 2):
        assert not [thread for thread in threading.enumerate() if "pacer" in thread.name]
    with checks.group(connect, 2, link_rate=1e9):
        assert [thread for thread in threading.enumerate() if "pacer" in thread.name]
    assert not [thread for thread in threading.enumerate() if "pacer" in thread.name]


def test_options_of_the_registry():
    with pytest.raises(ConfigError, match=r"there is no transport 'carrier-pigeon'; there are: .*inproc.*zmq"):
        get_backend("carrier-pigeon")
    for wrong in (
        {"scheme": "udp"}, {"security": "tls"}, {"window": 1}, {"max_payload_bytes": 5}, {"peer_timeout_s": 0.5}, {"io_threads": 0},
        {"link_rate": 0.0}, {"port_range": (5, 4)}, {"port_range": (0, 4)},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            TransportOptions(**wrong)
