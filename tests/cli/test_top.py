"""`squinchcomm top`: real ranks by every way to find them, rows from given readings, and dead or foreign servers."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from squinchcomm.cli.app import app
from squinchcomm.cli.readings import Reading
from squinchcomm.cli.top_rows import Board
from squinchcomm.cli.top_view import as_lines, as_table
from squinchcomm.errors import ConfigError
from tests.cli.command import CLI, environment, start
from tests.cli.small_job import LATE_S
from tests.dashboards.prometheus import free_ports, wait_for

JOB = Path(__file__).with_name("small_job.py")


def top(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["top", *map(str, arguments)])


def table(output: str) -> list[dict[str, str]]:
    """The rows of the last block of plain text, by the places of their titles."""
    lines = output.splitlines()
    place = max(index for index, line in enumerate(lines) if line.startswith("# rank"))
    titles = [title for title in lines[place][2:].split("  ") if title]
    rows = []
    for line in lines[place + 1 :]:
        if line.startswith("#"):
            break
        cells = [cell for cell in line.split("  ") if cell]
        rows.append({title.strip(): cell.strip() for title, cell in zip(titles, cells, strict=True)})
    return rows


class Ranks:
    """A job of two ranks, one of them late."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.textfiles = folder / "textfiles"
        self.textfiles.mkdir()
        files = str(self.textfiles / "job.prom")
        env = {"SQUINCH_METRICS_PORT": str(port), "SQUINCH_METRICS_FILE": files, "SQUINCH_RECORDER_DIR": str(folder / "rec")}
        self.process = start("run", "-n", "2", JOB, folder, env=env)

    def wait_until_busy(self) -> None:
        def busy() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            rows = table(top("--port", self.port, "--ranks", 2, "--once", "--interval", 0.3).output)
            return [row["op"] for row in rows] == ["allreduce squinch6"] * 2

        wait_for(busy, "two busy ranks", 60)

    def end(self) -> None:
        (self.folder / "stop").touch()
        try:
            self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    job = Ranks(tmp_path_factory.mktemp("job"), free_ports(3))
    try:
        job.wait_until_busy()
        yield job
    finally:
        job.end()


def test_ranks_of_a_job_with_the_late_one_marked(ranks: Ranks) -> None:
    def marked() -> str:
        done = top("--port", ranks.port, "--ranks", 3, "--once", "--interval", 1)
        assert done.exit_code == 0, done.output
        return done.output if "behind: 1" in done.output else ""

    output = wait_for(marked, "mark of the late rank", 30)  # on a busy machine the other one may be late, too
    assert "2 of 3 ranks answer" in output
    first, late, dead = table(output)
    assert (first["rank"], late["rank"], dead["rank"]) == ("0", "1", "?")
    assert first["op"] == late["op"] == "allreduce squinch6"
    assert 1 < float(first["coll/s"]) < 2 / LATE_S
    assert float(first["out MB/s"]) == pytest.approx(float(first["coll/s"]) / 2 * 0.1505, rel=0.4, abs=0.2)
    assert 5.2 < float(first["ratio"]) < 5.4
    assert first["failed"] == "0" and float(first["idle s"]) < 2
    assert late["state"].startswith("behind: others wait") and first["state"] == "ok"
    assert float(first["wait %"]) > float(late["wait %"]) + 10
    assert dead["state"] == "down: Connection refused"


def test_targets_from_files(ranks: Ranks, tmp_path: Path) -> None:
    targets = tmp_path / "targets.json"
    listed = [f"127.0.0.1:{ranks.port + rank}" for rank in (1, 0)]
    targets.write_text(json.dumps([{"targets": [each], "labels": {"job": "squinchcomm"}} for each in listed]))
    for place in (targets, ranks.textfiles):
        done = top("--file", place, "--once", "--interval", 0.2)
        assert done.exit_code == 0, done.output
        assert [row["rank"] for row in table(done.output)] == ["0", "1"] and "2 of 2 ranks answer" in done.output


def test_lines_of_text_until_the_reader_leaves(ranks: Ranks) -> None:
    """Live and not a terminal: a block for each look; neither a closed pipe nor Ctrl-C is an error."""
    for how in ("interrupt", "pipe"):
        process = start("top", f"127.0.0.1:{ranks.port},127.0.0.1:{ranks.port + 1}", "--interval", "0.2")
        assert process.stdout is not None and process.stderr is not None
        lines = [process.stdout.readline() for _ in range(9)]
        assert [line[:6] for line in lines[1::4]] == ["# rank"] * 2, lines
        if how == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
        process.stderr.close()
        process.stdout.close()


@pytest.mark.parametrize(("end", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_table_in_a_terminal(ranks: Ranks, end: signal.Signals, status: int) -> None:
    ours, theirs = pty.openpty()
    command = [*CLI, "top", "--port", str(ranks.port), "--ranks", "2", "--interval", "0.2"]
    env = environment(TERM="xterm", COLUMNS="200", LINES="30")
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 30
    while shown.count(b"behind: others wait") < 2 and time.monotonic() < deadline:
        if select.select([ours], [], [], 1.0)[0]:
            shown += os.read(ours, 65536)
    process.send_signal(end)
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([ours], [], [], 0.2)[0]:
            shown += _rest(ours)
    assert process.wait(10) == status
    shown += _rest(ours)
    os.close(ours)
    text = shown.decode()
    assert "allreduce squinch6" in text and "2 of 2 ranks answer" in text and "Traceback" not in text
    assert "\x1b[1;33m" in text  # the late rank, bold and yellow
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1  # the screen is given back


def _rest(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536) if select.select([terminal], [], [], 0)[0] else b""
    except OSError:  # Linux: nobody holds the other end any more
        return b""


class Foreign(BaseHTTPRequestHandler):
    """Answers that are none of a rank."""

    answer = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def foreign() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "without metrics of squinchcomm"),
        (b"a 1\n", "without metrics of squinchcomm"),
        (b"\x00\xff{", "codec can't decode"),
        (b"a{b=1} what\n", "no metrics"),
    ],
    ids=repr,
)
def test_others_that_answer(foreign: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, answer: bytes, words: str) -> None:
    monkeypatch.setattr(Foreign, "answer", answer)
    done = top(f"127.0.0.1:{foreign.server_port}", "--once")
    assert done.exit_code == 1 and words in done.output


def test_a_rank_that_accepts_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("squinchcomm.cli.readings.ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        done = top(f"127.0.0.1:{mute.getsockname()[1]}", "--once")
    assert done.exit_code == 1 and "down: timed out" in done.output


def test_a_rank_that_says_a_little_again_and_again(foreign: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(self: Foreign) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(50):
                self.wfile.write(b"#\n")
                threading.Event().wait(0.1)

    monkeypatch.setattr(Foreign, "do_GET", drip)
    monkeypatch.setattr("squinchcomm.cli.readings.ANSWER_S", 0.4)
    done = top(f"127.0.0.1:{foreign.server_port}", "--once")
    assert done.exit_code == 1 and "down: timed out" in done.output


def reading(rank: int, at: float, calls: float, wait: float = 0.0, in_flight: int = 1, ended: float | None = None) -> Reading:
    """A rank of four that has made so many calls of 1 MB, 8 to 1."""
    call = {"op": "allreduce", "codec": "squinch6"}
    return Reading(
        f"h:{rank}",
        at,
        {
            "rank_info": [({"rank": str(rank), "world_size": "4", "node": "h"}, 1.0)],
            "collectives_total": [(call, calls), ({"op": "send", "codec": "none"}, 1000 * calls)],
            "collective_duration_seconds_sum": [({"op": "allreduce"}, calls * 0.1)],
            "raw_bytes_total": [(call, calls * 8e6)],
            "sent_wire_bytes_total": [(call, calls * 1e6)],
            "received_wire_bytes_total": [(call, calls * 2e6)],
            "wait_seconds_total": [({}, wait)],
            "inflight_collectives": [({}, in_flight)],
            "last_collective_timestamp_seconds": [({}, at if ended is None else ended)],
        },
    )


def test_rates_lie_between_two_readings() -> None:
    board = Board()
    board.take([reading(0, 1000.0, 10, wait=1.0)])
    assert board.rows()[0].collectives_per_s is None and board.rows()[0].ratio == 8.0
    board.take([reading(0, 1002.0, 30, wait=2.0)])
    (row,) = board.rows()
    assert (row.collectives_per_s, row.sent_bytes_per_s, row.received_bytes_per_s) == (10.0, 1e7, 2e7)
    assert (row.wait, row.op, row.ratio) == (0.5, "allreduce squinch6", 8.0)
    board.take([reading(0, 1002.0, 30, wait=2.0)])  # the same file again
    assert board.rows() == [row]
    board.take([reading(0, 1004.0, 3)])  # it was started anew
    assert board.rows()[0].collectives_per_s is None
    board.take([reading(0, 1005.0, 5)])
    assert board.rows()[0].collectives_per_s == 2.0


def test_a_rank_that_has_not_made_a_call_for_which_others_wait() -> None:
    board = Board()
    for at in (1000.0, 1002.0):
        board.take([reading(rank, at + 10, 5, wait=at, in_flight=int(rank != 2), ended=999.0) for rank in range(4)])
    rows = board.rows()
    assert [row.behind is not None for row in rows] == [False, False, True, False]
    assert rows[2].behind == "behind: others wait for 13 s"
    finished = Board()  # nobody waits: they are between calls
    finished.take([reading(rank, 1010.0, 5, in_flight=0, ended=999.0) for rank in range(4)])
    assert not any(row.behind for row in finished.rows())


def test_a_rank_that_ends_keeps_its_last_numbers() -> None:
    board = Board()
    board.take([reading(3, 1000.0, 10), reading(0, 1000.0, 10)])
    board.take([Reading("h:3", 1002.0, problem="Connection refused"), reading(0, 1002.0, 12)])
    first, last = board.rows()
    assert (first.rank, last.rank, last.problem) == (0, 3, "Connection refused")
    lines = as_lines(board.rows(), "trying")
    assert (
        "1 of 4 ranks answer" in lines[0]
        and "no target was given, or answers, for ranks 1, 2" in lines[0]
        and lines[0].endswith("trying")
    )
    assert lines[3].split()[0] == "3" and "down: Connection refused" in lines[3]


def test_more_ranks_than_lines() -> None:
    board = Board()
    board.take([reading(rank, 1000.0, 1) for rank in range(59)] + [Reading("h:59", 1000.0, problem="down")])
    from rich.console import Console

    console = Console(width=200, height=14)
    with console.capture() as capture:
        console.print(as_table(board.rows(), None, 14, 200))
    lines = capture.get().splitlines()
    assert len(lines) <= 14 and "50 more ranks" in lines[-1] and "h:59" in lines[2]


def test_a_narrow_terminal_leaves_columns_out() -> None:
    from rich.console import Console

    board = Board()
    for at in (1000.0, 1002.0):
        board.take([reading(rank, at, at, wait=at * rank / 10) for rank in range(4)])
    for width in (70, 80, 200):
        console = Console(width=width)
        with console.capture() as capture:
            console.print(as_table(board.rows(), None, 30, width))
        lines = capture.get().splitlines()
        assert all(title in lines[1] for title in ("rank", "coll/s", "out MB/s", "wait %", "idle s", "state")), lines
        assert ("in MB/s" in lines[1]) is (width == 200)
        assert "behind: other" in lines[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "whose job?"),
        (["h:1", "--port", "2"], "HOST:PORT and --port: give one of them"),
        (["--port", "9500"], "give --ranks"),
        (["--port", "65535", "--ranks", "2"], "not within 1 to 65535"),
        (["--ranks", "2", "h:1"], "belong to --port"),
        (["here"], "write HOST:PORT"),
        (["h:1", "--interval", "0"], "--interval 0"),
        (["--prometheus", "here:9090"], "give a URL"),
        (["--prometheus", "http://127.0.0.1:1"], "no answer (Connection refused)"),
        (["--file", "/nowhere.json"], "No such file"),
        (["--file", "/nowhere"], "a folder of such files"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_wrong_flags(arguments: list[str], words: str) -> None:
    done = top(*arguments, "--once")
    assert isinstance(done.exception, ConfigError) and words in str(done.exception)


@pytest.mark.parametrize("text", ["[]", "{}", '[{"targets": [7]}]', '[{"targets": ["a b:1"]}]', "\xff"])
def test_wrong_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "targets.json"
    path.write_text(text, encoding="latin-1")
    assert isinstance(top("--file", path, "--once").exception, ConfigError)
    assert isinstance(top("--file", tmp_path, "--once").exception, ConfigError)


def test_a_server_that_is_no_prometheus(foreign: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Foreign, "answer", b"<html>")
    done = top("--prometheus", f"http://127.0.0.1:{foreign.server_port}", "--once")
    assert isinstance(done.exception, ConfigError) and "not as a Prometheus server does" in str(done.exception)
