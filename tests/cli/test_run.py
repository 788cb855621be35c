"""The launcher, with real processes: output, failures, signals, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import CLI, environment, squinchcomm, start

Script = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(source: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text("import os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n" + source)
        return path

    return write


@pytest.fixture
def mark() -> str:
    """An argument by which descendants of a test are found in the process table."""
    return f"mark-{secrets.token_hex(8)}"


def marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if mark.encode() in (entry / "cmdline").read_bytes() and state != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_ranks_know_who_they_are_and_share_the_cores(script: Script) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SQUINCH_ADDRESS", "SQUINCH_JOB_TOKEN", "OMP_NUM_THREADS"]
    names += ["NUMBA_NUM_THREADS", "A", "SQUINCH_LINK_RATE"]
    path = script(f"import json; print(json.dumps([os.environ[name] for name in {names}] + sys.argv[1:]))")
    done = squinchcomm("run", "-n", "3", "--no-prefix", "--env", "A=b=c", "--emulate-link", "1Gbit", path, "-n", "x", "--env")
    assert done.returncode == 0, done.stderr
    rows = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert [row[:4] for row in rows] == [[str(rank), "3", str(rank), "3"] for rank in range(3)]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    for row in rows:
        assert row[4:6] == rows[0][4:6]
        assert row[4].startswith("ipc://@")
        assert len(row[5]) >= 32
        assert row[6:] == [threads, threads, "b=c", "1Gbit", "-n", "x", "--env"]
    again = squinchcomm("run", "-n", "1", "--no-prefix", "--env", "A=", "--emulate-link", "1Gbit", path)
    assert json.loads(again.stdout)[4:6] != rows[0][4:6]


def test_lines_are_whole_and_prefixed(script: Script) -> None:
    path = script(
        "for index in range(200):\n"
        "    for piece in (f'{index} ', 'x' * 300, '\\n'):\n"
        "        os.write(1 + index % 2, piece.encode())\n"
        "os.write(1, b'no newline at the end')\n"
    )
    done = squinchcomm("run", "-n", "3", path)
    assert done.returncode == 0
    for text in (done.stdout, done.stderr):
        lines = text.splitlines()
        tails = [line for line in lines if line.endswith("end")]
        assert len(tails) == (3 if text is done.stdout else 0)
        assert all(re.fullmatch(r"\[[012]\] \d+ x{300}", line) for line in lines if line not in tails)
        assert len(lines) - len(tails) == 300
    numbers = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("[1] ") and "end" not in line]
    assert numbers == sorted(numbers)


def test_a_very_long_line_does_not_need_its_end(script: Script) -> None:
    done = squinchcomm("run", "-n", "1", "--no-prefix", script("print('y' * 1_000_000)"))
    assert done.stdout.replace("\n", "") == "y" * 1_000_000


def test_colours_on_a_terminal_only(script: Script) -> None:
    path = script("print('hello')")
    assert "\x1b" not in squinchcomm("run", "-n", "2", path).stdout
    controller, terminal = pty.openpty()
    done = subprocess.run(
        [*CLI, "run", "-n", "2", str(path)],
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        env=environment(),
        timeout=30,
        check=True,
    )
    assert done.stderr == b""
    shown = os.read(controller, 4096).decode()
    os.close(controller)
    os.close(terminal)
    assert re.search(r"\x1b\[\d+m\[0\]\x1b\[0m hello", shown)


def test_modules_and_programs(tmp_path: Path) -> None:
    (tmp_path / "modul.py").write_text("import sys; print('module', *sys.argv[1:])")
    done = squinchcomm("run", "-n", "2", "--no-prefix", "-m", "modul", "-m", "7", cwd=tmp_path)
    assert done.stdout == "module -m 7\n" * 2
    assert squinchcomm("run", "-n", "2", "--no-prefix", "echo", "hi").stdout == "hi\nhi\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch.py"], "there is no file 'nosuch.py'"),
        (["nosuch-program"], "neither a .py file nor a program"),
        ([], "nothing to run"),
        (["--env", "A", "true"], "--env A: not of the form NAME=VALUE"),
        (["--env", "RANK=9", "true"], "--env RANK=9: squinchcomm run sets RANK itself"),
        (["--emulate-link", "1Gbit", "--env", "SQUINCH_LINK_RATE=2Gbit", "true"], "give one of them"),
        (["--timeout", "inf", "true"], "--timeout inf: give seconds above 0"),
        (["--timeout", "nan", "true"], "--timeout nan: give seconds above 0"),
        (["--timeout", "-1", "true"], "--timeout -1: give seconds above 0"),
        (["--grace", "inf", "true"], "--grace inf: give seconds from 0"),
    ],
)
def test_mistakes(arguments: list[str], message: str) -> None:
    done = squinchcomm("run", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("squinchcomm: error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_long_timeout_is_one_and_where_ranks_meet_can_be_chosen() -> None:
    script = "import os; print(os.environ['SQUINCH_ADDRESS'], os.environ['MASTER_PORT'])"
    variables = ["--env", "SQUINCH_ADDRESS=ipc://@chosen", "--env", "MASTER_PORT=7"]
    done = squinchcomm("run", "--timeout", "1e9", *variables, "-n", "1", "--no-prefix", sys.executable, "-c", script)
    assert (done.returncode, done.stdout) == (0, "ipc://@chosen 7\n"), done.stderr


def test_a_program_that_cannot_run(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/nosuch/interpreter\n")
    program.chmod(0o755)
    done = squinchcomm("run", program)
    assert done.returncode == 2
    assert done.stderr.startswith(f"squinchcomm: error: cannot start '{program}': No such file")


def test_standard_input_goes_to_rank_0(script: Script) -> None:
    done = squinchcomm("run", "-n", "2", script("print(rank, repr(sys.stdin.read()))"), stdin=None, input="words")
    assert sorted(done.stdout.splitlines()) == ["[0] 0 'words'", "[1] 1 ''"]


def test_first_failure_ends_the_job_with_its_status(script: Script, mark: str) -> None:
    path = script("sys.exit(7) if rank == 1 else time.sleep(60)")
    start_s = time.monotonic()
    done = squinchcomm("run", "-n", "3", path, mark)
    assert done.returncode == 7
    assert "rank 1 failed first (exit code 7)" in done.stderr
    assert time.monotonic() - start_s < 10
    assert marked(mark) == []


def test_a_rank_killed_by_a_signal(script: Script) -> None:
    done = squinchcomm("run", "-n", "2", script("os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(60)"))
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 0 failed first (killed by SIGKILL)" in done.stderr


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace_period(script: Script, mark: str) -> None:
    path = script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank:\n    time.sleep(60)\ntime.sleep(1)\nsys.exit(3)")
    start_s = time.monotonic()
    done = squinchcomm("run", "-n", "2", "--grace", "0.5", path, mark)
    assert done.returncode == 3
    assert time.monotonic() - start_s < 15
    assert marked(mark) == []


def test_timeout(script: Script, mark: str) -> None:
    done = squinchcomm("run", "-n", "2", "--timeout", "0.5", "--grace", "0.5", script("time.sleep(60)"), mark)
    assert done.returncode == 124
    assert "not done after 0.5 s" in done.stderr
    assert marked(mark) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(script: Script, mark: str, number: signal.Signals) -> None:
    path = script(
        "def handle(got, _):\n    print('got', got, flush=True)\n    sys.exit(0)\n"
        f"signal.signal({int(number)}, handle)\nprint('ready')\ntime.sleep(60)"
    )
    process = start("run", "-n", "2", path, mark)
    assert process.stdout is not None
    assert [process.stdout.readline().split()[1] for _ in range(2)] == ["ready", "ready"]
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert out.count(f"got {int(number)}") == 2
    assert number.name in err
    assert marked(mark) == []


def test_sigusr1_reaches_handlers_and_ends_nothing(script: Script, mark: str) -> None:
    path = script(
        "done = []\nif rank:\n    signal.signal(signal.SIGUSR1, lambda *_: (print('got', flush=True), done.append(1)))\n"
        "print('ready')\nfor _ in range(400):\n    time.sleep(0.05)\n    if done or sys.stdin.read(1):\n        break"
    )
    process = subprocess.Popen(
        [*CLI, "run", "-n", "2", path, mark], stdin=-1, stdout=-1, stderr=-1, text=True, env=environment()
    )
    assert process.stdout is not None and process.stdin is not None
    assert [process.stdout.readline().split()[1] for _ in range(2)] == ["ready", "ready"]
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline().split() == ["[1]", "got"]
    out, err = process.communicate("x", timeout=20)
    assert (process.returncode, out) == (0, "")
    assert "passed on to 1 of 2 ranks" in err and "rank 0; was SQUINCH_RECORDER_DIR set?" in err


def test_a_second_interrupt_kills_at_once(script: Script, mark: str) -> None:
    path = script("signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready')\ntime.sleep(60)")
    process = start("run", "-n", "2", "--grace", "50", path, mark)
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert "SIGINT" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT
    assert marked(mark) == []


# One child in the rank's process group, one that left it, as daemons do.
CHILDREN = (
    "sleeper = [sys.executable, '-c', 'import time; time.sleep(60)', sys.argv[1]]\n"
    "subprocess.Popen(sleeper)\n"
    "subprocess.Popen(sleeper, start_new_session=True)\n"
    "print('ready', flush=True)\n"
)


@pytest.mark.parametrize("ending", ["sys.exit(0)", "time.sleep(0.3); sys.exit(rank)", "time.sleep(60)"])
def test_children_of_ranks_end_with_the_job(script: Script, mark: str, ending: str) -> None:
    done = squinchcomm("run", "-n", "2", "--timeout", "3", "--grace", "0.5", script(CHILDREN + ending), mark)
    assert done.returncode == {"sys.exit(0)": 0, "time.sleep(60)": 124}.get(ending, 1)
    assert done.stdout.count("ready") == 2
    assert marked(mark) == []


def test_nothing_outlives_a_killed_launcher(script: Script, mark: str) -> None:
    process = start("run", "-n", "2", script(CHILDREN + "time.sleep(60)"), mark)
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    assert wait_for(lambda: len(marked(mark)) == 2 + 2 + 4)  # launcher and watchdog, ranks, their children
    process.kill()
    process.communicate(timeout=20)
    assert wait_for(lambda: marked(mark) == [], 5)


def test_output_that_nobody_reads_ends_the_job(script: Script, mark: str) -> None:
    command = f"'{sys.executable}' -m squinchcomm run -n 2 '{script('while True: print(rank)')}' {mark} | head -n 3"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30, env=environment(), check=False)
    assert len(done.stdout.splitlines()) == 3
    assert wait_for(lambda: marked(mark) == [], 10)


def test_help_shows_what_to_run() -> None:
    assert "squinchcomm run [OPTIONS] SCRIPT [ARGS]..." in squinchcomm("run", "--help", env={"COLUMNS": "120"}).stdout


def test_a_wrong_rate_is_found_before_ranks_start() -> None:
    done = squinchcomm("run", "-n", "2", "--emulate-link", "1GB", sys.executable, "-c", "print('started')")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("squinchcomm: error: --emulate-link: '1GB' is not a rate")
    assert len(done.stderr.splitlines()) == 1


def test_inproc_is_warned_of() -> None:
    code = "from squinchcomm.launch import detect; print(detect().source)"
    command = ["run", "-n", "2", "--no-prefix", "--env", "SQUINCH_TRANSPORT=inproc", sys.executable, "-c", code]
    done = squinchcomm(*command)
    assert done.stdout == "squinchcomm run\n" * 2
    assert "joins threads of one process" in done.stderr
