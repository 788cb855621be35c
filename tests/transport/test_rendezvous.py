"""Ranks that meet, and every way in which they do not."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from typing import Any

import msgspec
import pytest
import zmq

from squinchcomm.errors import ConfigError, PeerLost, SquinchError
from squinchcomm.transport import rendezvous
from squinchcomm.transport.options import TransportOptions
from squinchcomm.transport.rendezvous import MAX_BLOB_BYTES, Hello, exchange
from squinchcomm.transport.security import choose_security, generate_key

KEY = generate_key()


def free_address(host: str = "127.0.0.1") -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def meet(address: str, callers: list[dict[str, Any]], timeout_s: float = 5.0) -> list[Any]:
    """What `exchange` returned or raised for each caller, all at once; `late_s` delays one."""
    results: list[Any] = [None] * len(callers)

    def call(
        index: int, rank: int, world_size: int, blob: bytes | None = None, late_s: float = 0.0, group: str = "", **options: Any
    ) -> None:
        time.sleep(late_s)
        blob = b"blob of %d" % rank if blob is None else blob
        try:
            results[index] = exchange(
                address, rank, world_size, blob, options=TransportOptions(**options), timeout_s=timeout_s, group=group
            )
        except SquinchError as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,), kwargs=caller) for index, caller in enumerate(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def blobs(world_size: int) -> list[bytes]:
    return [b"blob of %d" % rank for rank in range(world_size)]


@pytest.mark.parametrize(
    "address", [free_address(), free_address("::1"), "ipc://@squinchcomm-test", "inproc://test", "localhost"]
)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_everybody_gets_all_blobs_again_and_again(address, world_size):
    if address == "localhost":
        address = free_address().replace("127.0.0.1", "localhost")
    for _ in range(3):
        assert (
            meet(address, [{"rank": rank, "world_size": world_size} for rank in range(world_size)])
            == [blobs(world_size)] * world_size
        )


@pytest.mark.parametrize("options", [{"job_token": "t"}, {"security": "curve", "key": KEY}], ids=["token", "curve"])
def test_with_secrets(options):
    assert meet(free_address(), [{"rank": rank, "world_size": 3, **options} for rank in range(3)]) == [blobs(3)] * 3


@pytest.mark.parametrize("late", [0, 2])
def test_late_ranks_are_waited_for(late):
    callers = [{"rank": rank, "world_size": 3, "late_s": 1.2 if rank == late else 0.0} for rank in range(3)]
    assert meet(free_address(), callers) == [blobs(3)] * 3


def test_large_blobs():
    callers = [{"rank": rank, "world_size": 3, "blob": bytes([rank]) * MAX_BLOB_BYTES} for rank in range(3)]
    assert meet(free_address(), callers) == [[bytes([rank]) * MAX_BLOB_BYTES for rank in range(3)]] * 3
    with pytest.raises(ConfigError, match="blob"):
        exchange("ipc://@x", 0, 2, bytes(MAX_BLOB_BYTES + 1), options=TransportOptions(), timeout_s=1)


@pytest.mark.parametrize("address", [free_address(), "inproc://missing"])
def test_missing_ranks_are_named_on_all(address):
    results = meet(address, [{"rank": rank, "world_size": 5} for rank in (0, 1, 3)], timeout_s=1.0)
    for result in results:
        assert isinstance(result, PeerLost)
    assert "ranks 2, 4 did not come within 1 s" in str(results[0])
    assert all("2" in str(result) and "4" in str(result) for result in results)


def test_missing_rank_0_is_named_in_time():
    start = time.monotonic()
    (result,) = meet(free_address(), [{"rank": 1, "world_size": 2}], timeout_s=1.0)
    assert isinstance(result, PeerLost)
    assert result.peer == 0
    assert "rank 0 did not answer at tcp://127.0.0.1:" in str(result)
    assert time.monotonic() - start < 2.0


def test_unreachable_host_is_an_error_in_time():
    start = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 0 did not answer at tcp://192\.0\.2\.1:5"):
        exchange("tcp://192.0.2.1:5", 1, 2, b"", options=TransportOptions(security="none"), timeout_s=0.5)
    with pytest.raises(ConfigError, match="does not resolve"):
        exchange("tcp://no-such-host.invalid:5", 1, 2, b"", options=TransportOptions(), timeout_s=0.5)
    assert time.monotonic() - start < 3.0


@pytest.mark.parametrize(
    "address", ["", "localhost:5", "tcp://:5", "tcp://h:0", "tcp://h:70000", "udp://h:5", "ipc:///tmp/x", "tcp://h"]
)
def test_addresses_that_are_none(address):
    with pytest.raises(ConfigError, match="no rendezvous address"):
        exchange(address, 0, 2, b"", options=TransportOptions(), timeout_s=0.5)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0), (0, 100_000)])
def test_ranks_that_are_none(rank, world_size):
    with pytest.raises(ConfigError, match="not in a world"):
        exchange("ipc://@x", rank, world_size, b"", options=TransportOptions(), timeout_s=0.5)


def test_busy_port_says_what_to_do():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"{address} is in use by another process.*choose another port"):
            exchange(address, 0, 2, b"", options=TransportOptions(), timeout_s=0.3)


def test_address_of_another_machine_cannot_be_listened_on():
    with pytest.raises(ConfigError, match="not an address of this machine"):
        exchange("tcp://192.0.2.1:5999", 0, 2, b"", options=TransportOptions(security="none"), timeout_s=0.3)


def all_refused(results: list[Any], *words: str) -> None:
    for result in results:
        assert isinstance(result, ConfigError), result
        assert all(word in str(result) for word in words), result


def test_duplicate_ranks_are_refused_on_all():
    results = meet(free_address(), [{"rank": rank, "world_size": 4} for rank in (0, 1, 1)])
    all_refused(results, "two processes say they are rank 1")


def test_second_rank_0_is_told_that_the_address_is_taken():
    results = meet(free_address(), [{"rank": 0, "world_size": 2}, {"rank": 0, "world_size": 2, "late_s": 0.2}], timeout_s=1.6)
    assert isinstance(results[1], ConfigError)
    assert "in use" in str(results[1])


def test_world_sizes_must_agree():
    callers = [{"rank": 0, "world_size": 3}, {"rank": 1, "world_size": 3}, {"rank": 2, "world_size": 4, "late_s": 0.2}]
    all_refused(meet(free_address(), callers), "rank 2 expects 4 ranks, rank 0 expects 3")


def test_versions_must_agree(monkeypatch):
    versions = itertools.count(1)
    monkeypatch.setattr(rendezvous, "package_version", lambda: f"0.{next(versions)}")
    all_refused(meet(free_address(), [{"rank": rank, "world_size": 2} for rank in range(2)]), "0.1", "0.2", "install the same")


def test_other_groups_wait_for_their_turn():
    address = free_address()
    callers = [{"rank": rank, "world_size": 2, "group": group, "blob": group.encode(), "late_s": late} for rank, group, late in
               [(0, "a", 0.0), (1, "b", 0.0), (1, "a", 0.4), (0, "b", 0.8)]]  # fmt: skip
    results = meet(address, callers)
    assert results == [[b"a", b"a"], [b"b", b"b"], [b"a", b"a"], [b"b", b"b"]]


def test_wrong_token_is_refused():
    callers = [{"rank": 0, "world_size": 2, "job_token": "a"}, {"rank": 1, "world_size": 2, "job_token": "b"}]
    results = meet(free_address(), callers, timeout_s=1.0)
    assert "refused our key or token" in str(results[1])
    assert "rank 1 did not come" in str(results[0])


def test_wrong_key_fails_in_time():
    callers = [{"rank": rank, "world_size": 2, "security": "curve", "key": generate_key()} for rank in range(2)]
    results = meet(free_address(), callers, timeout_s=1.0)
    assert "another key" in str(results[1])
    assert isinstance(results[0], PeerLost)


@pytest.mark.parametrize("message", [b"\xc1", b"\x91\x01", b"x" * 50_000])
def test_authenticated_nonsense_is_refused_on_all(message):
    address = free_address()
    context = zmq.Context()
    guest = context.socket(zmq.DEALER)
    guest.set(zmq.LINGER, 0)
    choose_security(TransportOptions(), beyond_loopback=False).set_client(guest)
    guest.connect(address)
    guest.send(message)
    start = time.monotonic()
    try:
        (result,) = meet(address, [{"rank": 0, "world_size": 2}], timeout_s=2.0)
    finally:
        guest.close()
        context.term()
    assert isinstance(result, ConfigError), result
    assert time.monotonic() - start < 2.0


def test_garbage_on_the_port_is_ignored():
    address = free_address()
    port = int(address.rpartition(":")[2])

    def disturb() -> None:
        time.sleep(0.3)
        for garbage in (b"GET / HTTP/1.0\r\n\r\n", b"\0" * 500):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(garbage)

    thread = threading.Thread(target=disturb)
    thread.start()
    callers = [{"rank": rank, "world_size": 2, "late_s": 0.7 * rank} for rank in range(2)]
    assert meet(address, callers) == [blobs(2)] * 2
    thread.join()


def test_hello_is_bounded():
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([1, "v" * 300, "", 2, 1, b"", b""]), type=Hello)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([1, "v", "", 2, 1, b"", bytes(MAX_BLOB_BYTES + 1)]), type=Hello)
