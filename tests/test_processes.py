"""Real processes: ranks that are killed, stopped, missing or strange."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import squinchcomm

WORKER = str(Path(__file__).parent / "rank_worker.py")


class Group:
    """Ranks as processes, each a worker whose JSON lines are read back."""

    def __init__(self, world_size: int, address: str | None = None, only: range | None = None, **options: Any) -> None:
        address = address or f"ipc://@squinchcomm-test-{secrets.token_hex(8)}"
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        self.processes = {
            rank: subprocess.Popen(
                [sys.executable, WORKER, str(rank), str(world_size), address, json.dumps(options)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in only or range(world_size)
        }

    def await_ready(self) -> None:
        for rank, process in self.processes.items():
            line = process.stdout.readline()
            assert '"ready"' in line, (rank, line, process.poll())

    def send_signal(self, rank: int, number: int) -> float:
        self.processes[rank].send_signal(number)
        return time.monotonic()

    def events(self, rank: int, timeout_s: float = 20.0) -> dict[str, dict[str, Any]]:
        """What is left of a rank's output once it has ended; it must have ended well."""
        process = self.processes[rank]
        out, err = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, (rank, process.returncode, out, err)
        return {event["event"]: event for event in map(json.loads, out.splitlines())}

    def kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                stream.close()


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made: list[Group] = []
    yield made
    for group in made:
        group.kill()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
@pytest.mark.parametrize(("world_size", "victim"), [(4, 2), (8, 0)])
def test_a_killed_rank_is_named_on_every_survivor_within_a_second(
    groups: list[Group], scheme: str, world_size: int, victim: int
) -> None:
    group = Group(world_size, scheme=scheme, codec="squinch6" if scheme == "ipc" else "none")
    groups.append(group)
    group.await_ready()
    time.sleep(0.5)
    killed_at = group.send_signal(victim, signal.SIGKILL)
    for rank in set(range(world_size)) - {victim}:
        events = group.events(rank)
        assert events["failed"]["error"] == "PeerLost" and events["failed"]["peer"] == victim, events
        assert events["failed"]["done"] > 0
        assert events["failed"]["at"] - killed_at <= 1.0, events
        assert events["closed"]["took_s"] <= 2.0
    assert group.processes[victim].wait() == -signal.SIGKILL


def test_a_stopped_rank_is_lost_within_the_peer_timeout(groups: list[Group]) -> None:
    group = Group(3, peer_timeout_s=2.0)
    groups.append(group)
    group.await_ready()
    time.sleep(0.3)
    stopped_at = group.send_signal(1, signal.SIGSTOP)
    for rank in (0, 2):
        events = group.events(rank)
        assert events["failed"]["error"] == "PeerLost" and events["failed"]["peer"] == 1, events
        assert 0.5 <= events["failed"]["at"] - stopped_at <= 2.6, events
    group.send_signal(1, signal.SIGCONT)
    assert group.events(1)["failed"]["error"] in ("PeerLost", "CommunicatorAborted")


def test_a_busy_address_and_a_missing_rank_are_clear_errors(groups: list[Group]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        group = Group(2, f"tcp://127.0.0.1:{port}", only=range(1), connect_timeout_s=3.0)
        groups.append(group)
        refused = group.events(0)["refused"]
        assert refused["error"] == "ConfigError" and str(port) in refused["message"]
    group = Group(3, f"tcp://127.0.0.1:{free_port()}", only=range(2), connect_timeout_s=3.0)
    groups.append(group)
    for rank in range(2):
        refused = group.events(rank)["refused"]
        assert refused["error"] == "PeerLost" and "2" in refused["message"], refused


def test_an_address_where_nobody_is_is_an_error_in_time(groups: list[Group]) -> None:
    group = Group(2, f"tcp://127.0.0.1:{free_port()}", only=range(1, 2), connect_timeout_s=2.0)
    groups.append(group)
    started = time.monotonic()
    refused = group.events(1)["refused"]
    assert refused["error"] == "PeerLost" and time.monotonic() - started < 6.0


def test_strangers_on_the_ports_do_not_disturb(groups: list[Group]) -> None:
    group = Group(2, scheme="tcp", calls=150, pause_s=0.01)
    groups.append(group)
    group.await_ready()
    ports = {port for process in group.processes.values() for port in _listening_ports(process.pid)}
    assert ports
    for port in ports:
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(500),
            b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + b"\0" * 48 + os.urandom(99),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=2.0) as stranger:
                stranger.sendall(garbage)
    events = [group.events(rank) for rank in range(2)]
    assert events[0]["closed"]["done"] == 150
    assert events[0]["closed"]["hash"] == events[1]["closed"]["hash"]


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _listening_ports(pid: int) -> set[int]:
    inodes = _socket_inodes(pid)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def test_a_program_that_forgets_to_close_ends_all_the_same(groups: list[Group]) -> None:
    group = Group(3, calls=3, forget_to_close=True)
    groups.append(group)
    group.await_ready()
    for rank in range(3):
        assert "failed" not in group.events(rank, timeout_s=10.0)


def forgetful_rank(rank: int, address: str) -> None:
    comm = squinchcomm.init(rank, 3, address, min_compress_bytes=0, link_rate="20Mbit")
    for _ in range(2):
        comm.allreduce(np.ones(1 << 18, np.float32), codec="squinch6")
    globals()["kept"] = comm  # as programs do that have it in a module


def test_what_a_child_process_sent_last_arrives_though_it_forgets_to_close() -> None:
    context = multiprocessing.get_context("spawn")
    address = f"ipc://@squinchcomm-test-{secrets.token_hex(8)}"
    processes = [context.Process(target=forgetful_rank, args=(rank, address)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
    assert [process.exitcode for process in processes] == [0, 0, 0]


def test_a_world_that_ends_leaves_nothing(groups: list[Group]) -> None:
    group = Group(4, calls=20, pause_s=0.02)
    groups.append(group)
    group.await_ready()
    names = set.union(*(_abstract_sockets(_socket_inodes(process.pid)) for process in group.processes.values()))
    assert names
    hashes = {group.events(rank)["closed"]["hash"] for rank in range(4)}
    assert len(hashes) == 1
    assert not names & _abstract_sockets()


def _abstract_sockets(inodes: set[str] | None = None) -> set[str]:
    """Names of the sockets of ours that exist on this machine, or of those among `inodes`."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@squinchcomm" in line]
    return {row[7] for row in rows if inodes is None or row[6] in inodes}
