"""Processes that die, hang, fork and end: what the survivors see, and when."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from squinchcomm.errors import CommunicatorAborted
from tests.conformance import transport_checks as checks

from .processes import world


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_killed_process_is_lost_within_a_second_everywhere(scheme):
    with world(3, "report_losses", scheme=scheme) as (transport, processes, pipes):
        assert [pipe.recv() for pipe in pipes] == ["ready"] * 2
        os.kill(processes[0].pid, signal.SIGKILL)
        killed = time.time()
        assert checks.await_loss(transport, 1, 1.0) < 0.6
        assert transport.lost == {1: "connection closed"}
        assert pipes[1].poll(1.0)
        peer, reason, when = pipes[1].recv()
        assert (peer, reason) == (1, "connection closed")
        assert when - killed < 0.6


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_stopped_process_is_lost_within_the_peer_timeout(scheme):
    with world(3, "report_losses", scheme=scheme, peer_timeout_s=1.0) as (transport, processes, pipes):
        assert [pipe.recv() for pipe in pipes] == ["ready"] * 2
        time.sleep(0.5)
        os.kill(processes[0].pid, signal.SIGSTOP)
        stopped = time.time()
        assert 0.4 < checks.await_loss(transport, 1, 2.0) < 1.2
        assert transport.lost[1].endswith("no sign of life for 1.0 s")
        assert pipes[1].poll(1.0)
        peer, reason, when = pipes[1].recv()
        assert peer == 1
        assert reason.endswith("no sign of life for 1.0 s")
        assert when - stopped < 1.2


def test_frames_of_a_killed_process_are_delivered_first():
    with world(2, "send_and_wait", scheme="tcp") as (transport, processes, pipes):
        assert pipes[0].recv() == "ready"
        os.kill(processes[0].pid, signal.SIGKILL)
        processes[0].join()
        time.sleep(0.3)
        frames = checks.receive(transport, transport.window)
        assert [int.from_bytes(frame.header, "little") for frame in frames] == list(range(transport.window))
        for frame in frames:
            frame.release()
        assert checks.await_loss(transport, 1, 1.0) < 0.5


def test_interpreter_ends_with_an_open_transport():
    with world(2, "leave_without_closing") as (transport, processes, pipes):
        assert checks.receive(transport)[0].header == b"last words"
        assert pipes[0].recv() == "ready"
        processes[0].join(5)
        assert processes[0].exitcode == 0
        assert checks.await_loss(transport, 1, 1.0) < 0.6


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_gets_a_clear_error_and_does_no_harm():
    with checks.group(lambda n: checks.connect_group("zmq", n), 2) as (a, b):
        a.send(1, b"before")
        child = os.fork()
        if child == 0:
            os._exit(_in_child(a))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        a.send(1, b"after", bytes(100_000))
        assert [frame.header for frame in checks.receive(b, 2)] == [b"before", b"after"]
        assert not a.lost
        assert not b.lost


def _in_child(inherited) -> int:
    """0 if the inherited transport refuses, closes without effect, and a new group works."""
    for call in (lambda: inherited.send(1, b""), lambda: inherited.recv(0.1)):
        try:
            call()
        except CommunicatorAborted as error:
            if "forked" not in str(error):
                return 2
        else:
            return 1
    inherited.close()
    with checks.group(lambda n: checks.connect_group("zmq", n), 2) as (a, b):
        a.send(1, b"", bytes(100_000))
        checks.receive(b)
    return 0


def test_waiting_does_not_burn_the_processor():
    with checks.group(lambda n: checks.connect_group("zmq", n), 2) as (a, _):
        before = time.process_time()
        a.recv(1.0)
        assert time.process_time() - before < 0.1


def test_recv_survives_signals():
    seen = []
    previous = signal.signal(signal.SIGALRM, lambda *_: seen.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        with checks.group(lambda n: checks.connect_group("zmq", n), 2) as (a, b):
            timer = threading.Timer(0.3, b.send, (0, b"", bytes(100_000)))
            timer.start()
            assert len(checks.receive(a)) == 1
            timer.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert len(seen) > 5
