"""Starts the ranks of a job on this machine, shows their output and leaves nothing behind, whatever ends it."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Literal

from squinchcomm.cli.reaper import (
    ENDING_SIGNALS,
    TOKEN_VARIABLE,
    Watchdog,
    die_with,
    kill_marked,
    signal_groups,
    signal_handlers,
)

_LONGEST_LINE = 1 << 16  # bytes; a longer one is shown in pieces
_COLOURS = (36, 33, 35, 32, 34, 31)
_DRAIN_S = 1.0  # for output of processes that were just killed

_LONGEST_WAIT_S = 3600.0  # epoll counts milliseconds in 32 bits

MAX_RANKS = 1024
TIMED_OUT = 124  # as timeout(1) has it

# What tells a rank who it is. Where ranks meet (SQUINCH_ADDRESS, MASTER_ADDR, MASTER_PORT) may be chosen.
RESERVED_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SQUINCH_LAUNCHER", TOKEN_VARIABLE)


@dataclass
class Job:
    """What to start, and how to show and stop it.

    Attributes:
        command: Program and arguments of each rank.
        world_size: Ranks to start.
        extra_env: Variables for every rank, above those inherited.
        output: What happens to lines of output: they get the rank in front, or are kept whole, or ranks write to our streams.
        timeout_s: The job fails after this many seconds; None for never.
        grace_s: Seconds between asking ranks to stop and killing them.
    """

    command: Sequence[str]
    world_size: int
    extra_env: Mapping[str, str] = field(default_factory=dict)
    output: Literal["prefixed", "lines", "inherited"] = "prefixed"
    timeout_s: float | None = None
    grace_s: float = 5.0

    def run(self) -> int:
        """Runs the job to its end.

        Returns:
            0, or that of the rank that failed first (128 + n if signal n ended it), 128 + n if this process was told to stop
            by signal n, 124 after the timeout.

        Raises:
            OSError: the program cannot be started.
        """
        return _Running(self).finish()


def failure_text(code: int) -> str:
    """A return code of `subprocess.Popen` in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def _exit_code_of(pid: int) -> int | None:
    """As `Popen.returncode`, but leaves the process to be reaped; None while it runs."""
    state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        print(f"squinchcomm run: {message}", file=sys.stderr, flush=True)


class _Output:
    """One stream of one rank, passed on in whole lines."""

    def __init__(self, pipe: IO[bytes], target: int, prefix: bytes) -> None:
        self.pipe, self.target, self.prefix = pipe, target, prefix
        self.rest = b""

    def pump(self) -> bool:
        """Passes on what is there; False at the end of the stream."""
        data = os.read(self.pipe.fileno(), 1 << 16)
        lines = (self.rest + data).split(b"\n")
        self.rest = lines.pop()
        if self.rest and (not data or len(self.rest) >= _LONGEST_LINE):
            lines.append(self.rest)
            self.rest = b""
        if lines:
            _write_all(self.target, b"".join(self.prefix + line + b"\n" for line in lines))
        return bool(data)


def _write_all(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


class _Running:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.token = secrets.token_hex(16)
        self.exit_code = 0
        self.deadline = None if job.timeout_s is None else time.monotonic() + job.timeout_s
        self.stopping = False
        self.kill_at: float | None = None  # while stopping: when patience ends
        self.selector = selectors.DefaultSelector()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ended: set[int] = set()  # not reaped: a reaped process's group number could become a stranger's

    def finish(self) -> int:
        with _signals_as_bytes() as wakeup:
            watchdog = Watchdog(self.token)
            try:
                self._start(watchdog)
                self.selector.register(wakeup, selectors.EVENT_READ)
                while len(self.ended) < len(self.processes):
                    self._step(wakeup)
                self.selector.unregister(wakeup)
            finally:
                self._clean_up()
                watchdog.dismiss()
                self.selector.close()
        return self.exit_code

    def _start(self, watchdog: Watchdog) -> None:
        environments = rank_environments(self.job.world_size, self.token, self.job.extra_env)
        target = None if self.job.output == "inherited" else subprocess.PIPE
        for rank, environment in enumerate(environments):
            process = subprocess.Popen(
                self.job.command,
                env=environment,
                # A terminal would stop rank 0, which is not in its foreground group, at the first read.
                stdin=None if rank == 0 and not _is_terminal(sys.stdin) else subprocess.DEVNULL,
                stdout=target,
                stderr=target,
                process_group=0,
                preexec_fn=die_with(os.getpid()),  # noqa: PLW1509  there are no threads here
            )
            self.processes.append(process)
            watchdog.guard(process.pid)
            self._read_from(rank, process)

    def _read_from(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        for pipe, target in ((process.stdout, 1), (process.stderr, 2)):
            if pipe is not None:
                prefix = _prefix(rank, os.isatty(target)) if self.job.output == "prefixed" else b""
                self.selector.register(pipe, selectors.EVENT_READ, _Output(pipe, target, prefix))

    def _step(self, wakeup: socket.socket) -> None:
        due = [moment for moment in (self.kill_at, self.deadline) if moment is not None]
        patience_s = min(max(0.0, min(due) - time.monotonic()), _LONGEST_WAIT_S) if due else None
        for key, _ in self.selector.select(patience_s):
            if isinstance(key.data, _Output):
                self._pump(key.data)
            else:
                self._on_signals(wakeup.recv(64))
        self._notice_ends()
        now = time.monotonic()
        if self.deadline is not None and now >= self.deadline:
            _say(f"the job is not done after {self.job.timeout_s:g} s; stopping it")
            self._stop(TIMED_OUT)
        if self.kill_at is not None and now >= self.kill_at:
            self._kill()

    def _pump(self, output: _Output) -> None:
        try:
            more = output.pump()
        except BrokenPipeError:
            # Whoever read our output is gone, as in `squinchcomm run ... | head`.
            self._stop(128 + signal.SIGPIPE)
            more = False
        if not more:
            self.selector.unregister(output.pipe)
            output.pipe.close()

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGUSR1:
                self._pass_on_usr1()
            if number not in ENDING_SIGNALS:
                continue
            if self.stopping:
                self._kill()
                continue
            name = signal.Signals(number).name
            _say(f"{name}: passed on; ranks that are still there after {self.job.grace_s:g} s are killed (again: at once)")
            self._stop(128 + number, number)

    def _pass_on_usr1(self) -> None:
        there = [process.pid for rank, process in enumerate(self.processes) if rank not in self.ended]
        reached = signal_handlers(there, signal.SIGUSR1)
        left_out = [str(rank) for rank, process in enumerate(self.processes) if process.pid in set(there) - reached]
        _say(f"SIGUSR1: passed on to {len(reached)} of {len(there)} ranks")
        if left_out:
            _say(f"no handler for SIGUSR1, which would end it, has rank {', '.join(left_out)}; was SQUINCH_RECORDER_DIR set?")

    def _notice_ends(self) -> None:
        for rank, process in enumerate(self.processes):
            code = None if rank in self.ended else _exit_code_of(process.pid)
            if code is None:
                continue
            self.ended.add(rank)
            if code == 0 or self.stopping:
                continue
            others = "; stopping the others" if len(self.ended) < len(self.processes) else ""
            _say(f"rank {rank} failed first ({failure_text(code)}){others}")
            self._stop(code if code > 0 else 128 - code)

    def _stop(self, exit_code: int, number: int = signal.SIGTERM) -> None:
        if self.stopping:
            return
        self.stopping, self.exit_code, self.deadline = True, exit_code, None
        self.kill_at = time.monotonic() + self.job.grace_s
        signal_groups([process.pid for process in self.processes], number)

    def _kill(self) -> None:
        self.kill_at = None
        signal_groups([process.pid for process in self.processes], signal.SIGKILL)

    def _clean_up(self) -> None:
        """Ends children that ranks left, then shows what they still had to say."""
        signal_groups([process.pid for process in self.processes], signal.SIGKILL)
        kill_marked(self.token)
        for process in self.processes:
            process.wait()
        until = time.monotonic() + _DRAIN_S
        while outputs := [key.data for key in self.selector.get_map().values() if isinstance(key.data, _Output)]:
            ready = self.selector.select(max(0.0, until - time.monotonic()))
            if not ready or time.monotonic() > until:
                break
            for key, _ in ready:
                if isinstance(key.data, _Output):
                    self._pump(key.data)
        for output in outputs:
            output.pipe.close()


def rank_environments(world_size: int, token: str, extra: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment of each rank: ours, thread counts that share the cores, where to meet, `extra`, and who it is."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // world_size))
    defaults = {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = {
        "SQUINCH_ADDRESS": f"ipc://@squinchcomm-run-{secrets.token_hex(8)}",
        # Not for us, but for scripts that also call torch.distributed.init_process_group.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    job = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        TOKEN_VARIABLE: token,
        "SQUINCH_LAUNCHER": "run",
    }
    for rank in range(world_size):
        yield {**defaults, **os.environ, **meeting, **extra, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _prefix(rank: int, colour: bool) -> bytes:
    text = f"[{rank}]"
    return (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m " if colour else f"{text} ").encode()


def _is_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and stream.isatty()


@contextlib.contextmanager
def _signals_as_bytes() -> Iterator[socket.socket]:
    """A socket that receives the number of each signal that ends us, tells of a child's end or is for the ranks."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    numbers = (*ENDING_SIGNALS, signal.SIGCHLD, signal.SIGUSR1)
    handlers = [signal.signal(number, lambda *_: None) for number in numbers]
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        reader.close()
        writer.close()
