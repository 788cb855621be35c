"""The flight recorder: what it keeps, when it writes, and that it never stands in the way."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from squinchcomm import recorder, recordings
from squinchcomm.errors import CollectiveTimeout, CommunicatorAborted, ConfigError, PeerLost
from squinchcomm.recordings import Recording
from tests.cli.command import environment
from tests.worlds import ones, outcomes, run_world


def files(folder: Path) -> dict[int, Recording]:
    found, problems = recordings.read_folder(folder)
    assert problems == [] and all(each.damage == [] for each in found)
    return {each.header.rank: each for each in found}


def test_the_latest_calls_with_all_that_is_known(tmp_path: Path) -> None:
    def body(comm: Any) -> None:
        for _ in range(20):
            comm.allreduce(ones(5))
        comm.allreduce(np.ones((300, 200), np.float32), "avg", codec="squinch6")
        comm.reduce_scatter(np.empty(comm.rank + 1), np.ones(6), "max", counts=[1, 2, 3])
        comm.broadcast(np.ones(3, np.int16), 1, async_op=True).wait()

    run_world(3, body, recorder=10, recorder_dir=tmp_path / "deep" / "er")
    found = files(tmp_path / "deep" / "er")
    assert sorted(found) == [0, 1, 2]
    assert sorted(path.name[-10:] for path in (tmp_path / "deep" / "er").iterdir()) == [
        f"{rank:04d}.jsonl" for rank in range(3)
    ]
    for rank, recording in found.items():
        header = recording.header
        assert (header.world_size, header.transport, header.reason, header.closed) == (3, "inproc", "closed", True)
        assert (header.next_call, header.capacity, header.calls, header.failure) == (24, 10, 10, None)
        assert list(recording.calls) == list(range(14, 24))
        assert {call.state for call in recording.calls.values()} == {"done"}
        *_, last = recording.calls.values()
        assert (last.op, last.dtype, last.root, last.count, last.shape) == ("broadcast", "int16", 1, 3, (3,))
        compressed = recording.calls[21]
        assert (compressed.codec, compressed.reduction, compressed.shape, compressed.nbytes) == (
            "squinch6",
            "avg",
            (300, 200),
            240_000,
        )
        assert compressed.raw > 5 * compressed.sent > 0 < compressed.received
        assert compressed.queued <= compressed.started < compressed.ended <= header.written
        assert compressed.queued_at == pytest.approx(header.written_at, abs=60) and compressed.wait_s >= 0
        assert sum(compressed.waits.values()) == pytest.approx(compressed.wait_s)
        assert recording.calls[22].parts == (1, 2, 3) and rank not in compressed.waits
    assert len({recording.header.group for recording in found.values()}) == 1


def test_calls_before_a_timeout_are_written_while_others_still_wait(tmp_path: Path) -> None:
    written: list[dict[int, Recording]] = []

    def body(comm: Any) -> None:
        comm.barrier()
        if comm.rank == 2:
            threading.Event().wait(1.0)
            with pytest.raises(CollectiveTimeout):
                comm.allreduce(ones(10), timeout_s=5.0)
            return
        works = [comm.allreduce(ones(10), async_op=True, timeout_s=0.5) for _ in range(2)]
        with pytest.raises(CollectiveTimeout):
            works[0].wait()
        if comm.rank == 0:
            written.append(files(tmp_path))

    run_world(3, body, recorder_dir=tmp_path)
    recording = written[0][0]
    assert recording.header.reason == "CollectiveTimeout" and "rank 2" in recording.header.failure
    failed, waiting = recording.calls[2], recording.calls[3]
    assert (failed.state, failed.error, failed.blames, waiting.state) == ("failed", "CollectiveTimeout", 2, "queued")
    assert 2 in failed.due and failed.waits[2] > 0.1
    assert re.search(
        r"still waiting for (rank 2: look at what rank 2 is|ranks 1, 2: look at what ranks 1, 2 are) doing", failed.message
    )
    assert "`squinchcomm trace` tells who is behind" in failed.message
    assert not failed.message.startswith("not started")
    assert files(tmp_path)[0].header.closed and files(tmp_path)[0].calls[2].state == "failed"


def test_aborts_and_lost_ranks_are_written_and_later_calls_leave_them_alone(tmp_path: Path) -> None:
    def body(comm: Any) -> Any:
        if comm.rank == 0:
            comm.barrier()
            comm.abort("enough")
            return
        comm.barrier()
        for _ in range(30):
            with pytest.raises((CommunicatorAborted, PeerLost)):
                comm.barrier()

    run_world(2, body, recorder_dir=tmp_path, recorder=5)
    aborted, told = files(tmp_path)[0], files(tmp_path)[1]
    assert "enough" in aborted.header.failure
    assert told.calls[2].state == "failed" and len(told.calls) == 3


def test_no_folder_no_file_and_no_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_world(2, lambda comm: comm.barrier())
    run_world(2, lambda comm: comm.barrier(), recorder=0, recorder_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_on_request(tmp_path: Path) -> None:
    def body(comm: Any) -> Any:
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(ConfigError, match="SQUINCH_RECORDER_DIR"):
                recorder.dump()
            paths = recorder.dump(tmp_path)
            assert {path.parent for path in paths} == {tmp_path} and len(paths) >= 2
        comm.barrier()

    run_world(2, body)
    found = files(tmp_path)
    assert found[0].header.reason == "asked for" and not found[0].header.closed


def test_a_folder_that_cannot_be_had_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "squinchcomm"):
        assert outcomes(2, lambda comm: comm.barrier(), recorder_dir=tmp_path / "file") == [None, None]
    assert "cannot write" in caplog.text and "file" in caplog.text


def test_chunks(tmp_path: Path) -> None:
    def body(comm: Any) -> None:
        comm.allreduce(ones(400_000), codec="squinch6")
        comm.broadcast(ones(100_000))

    run_world(3, body, recorder_dir=tmp_path, recorder_chunks=True, codec_threads=2)
    found = files(tmp_path)
    for rank, recording in found.items():
        of_call = [chunk for chunk in recording.chunks if chunk.call == 1]
        moved = [chunk for chunk in of_call if chunk.what == "sent"]
        assert {chunk.what for chunk in of_call} == {"encode", "decode", "sent", "received"}
        assert sum(chunk.nbytes + 60 for chunk in moved) == recording.calls[1].sent
        assert all(recording.calls[1].started <= chunk.at <= recording.calls[1].ended for chunk in of_call)
        assert {chunk.peer for chunk in of_call} == {0, 1, 2} - {rank}
        for chunk in moved:  # what is sent here arrives there
            there = found[chunk.peer].chunks
            assert [(c.call, c.peer, c.phase, c.chunk) for c in there if c.what == "received"].count(
                (1, rank, chunk.phase, chunk.chunk)
            ) == 1
    assert not list(tmp_path.glob(".*"))


def test_damaged_files_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    run_world(2, lambda comm: [comm.barrier() for _ in range(9)], recorder_dir=tmp_path)
    first, second = sorted(tmp_path.iterdir())
    lines = first.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join(lines[:6]) + lines[6][:20])
    second.write_bytes(b"\xff\xfe" + second.read_bytes()[300:])
    (tmp_path / "other.jsonl").write_text(json.dumps({"line": "header", "version": 99}))
    (tmp_path / "empty.jsonl").write_text("")
    found, problems = recordings.read_folder(tmp_path)
    assert [len(each.calls) for each in found] == [5]
    assert any("line 7" in text for text in found[0].damage) and any("5 of 10 calls" in text for text in found[0].damage)
    assert len(problems) == 3 and any(second.name in text for text in problems)
    with pytest.raises(ConfigError, match=r"is no folder.*no rank has written yet"):
        recordings.read_folder(tmp_path / "nowhere")
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match=r"holds no recordings.*another SQUINCH_RECORDER_DIR"):
        recordings.read_folder(tmp_path)


SIGNALS = """
import os, signal, sys, threading, time
import squinchcomm

folder = sys.argv[1]
if sys.argv[2] == "own":
    signal.signal(signal.SIGUSR1, lambda *_: print("own handler", flush=True))
with squinchcomm.init(recorder_dir=folder) as comm:
    comm.barrier()
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)
        os._exit(len(os.listdir(folder)))  # the parent's calls are not the child's to write
    print("child", os.waitpid(child, 0)[1], flush=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    for _ in range(100):
        time.sleep(0.05)
        if os.path.exists(folder) and os.listdir(folder) or sys.argv[2] == "own":
            break
    print(len(os.listdir(folder)), flush=True)
"""


@pytest.mark.parametrize(
    ("whose", "said"), [("ours", ["child 0", "1"]), ("own", ["own handler", "child 0", "own handler", "0"])]
)
def test_sigusr1_writes_unless_the_application_has_a_handler(tmp_path: Path, whose: str, said: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SIGNALS, str(tmp_path), whose],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr
    (recording,) = files(tmp_path).values()
    assert recording.header.reason == "closed" and list(recording.calls) == [0, 1]


SIGTERM = """
import os, signal, sys, threading, time
import squinchcomm

folder, whose = sys.argv[1:]
if whose == "own":
    signal.signal(signal.SIGTERM, lambda *_: (print("own handler", flush=True), comm.close(), sys.exit(7)))
if whose == "taken":  # by the application, for an event loop of its own
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
comm = squinchcomm.init(recorder_dir=folder)
print(os.path.isdir(folder), flush=True)
comm.barrier()
child = whose != "own" and os.fork()
if child == 0 and whose != "own":
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(1)
if child:
    print("child", os.waitpid(child, 0)[1], len(os.listdir(folder)), flush=True)
if whose == "stuck":  # the main thread waits outside of Python, as in torch
    import ctypes
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    mutex = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
else:
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""


@pytest.mark.parametrize(
    ("whose", "code", "reason"), [("stuck", -15, "SIGTERM"), ("taken", -15, "SIGTERM"), ("own", 7, "closed")]
)
def test_sigterm_writes_and_ends_as_ever(tmp_path: Path, whose: str, code: int, reason: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SIGTERM, str(tmp_path / "new"), whose],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=False,
    )
    said = ["True", "own handler"] if whose == "own" else ["True", "child 15 0"]
    assert (done.returncode, done.stdout.splitlines()) == (code, said), done.stderr
    (recording,) = files(tmp_path / "new").values()
    assert recording.header.reason == reason and list(recording.calls) == [0, 1]
