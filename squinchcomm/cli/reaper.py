"""Ends processes with all their descendants, even those of a launcher that was killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

TOKEN_VARIABLE = "SQUINCH_JOB_TOKEN"
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with(parent: int) -> Callable[[], None]:
    """A `preexec_fn` that has the new process killed when `parent`, which starts it, dies."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare


def signal_groups(groups: Sequence[int], number: int) -> None:
    """Sends signal `number` to those of the process groups that still exist."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def signal_handlers(groups: Collection[int], number: int) -> set[int]:
    """Sends signal `number` to those processes of the groups that handle it, as others would die of it; the groups reached."""
    reached = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            group = os.getpgid(int(entry.name))
            if group in groups and _caught_signals(entry) >> (number - 1) & 1:
                os.kill(int(entry.name), number)
                reached.add(group)
    return reached


def _caught_signals(process: Path) -> int:
    """A bit for each signal for which the process has a handler, signal 1 being the lowest."""
    lines = (process / "status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)


def kill_marked(token: str) -> None:
    """Kills every process that inherited the job's token, such as daemons that left their rank's process group."""
    marker = f"{TOKEN_VARIABLE}={token}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


class Watchdog:
    """A process that outlives a SIGKILL of this one, and then ends the job."""

    def __init__(self, token: str) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._watch(reader, token)
            finally:
                os._exit(0)
        os.close(reader)

    def guard(self, group: int) -> None:
        """Adds a process group to those that end with us."""
        os.write(self._writer, f"{group}\n".encode())

    def dismiss(self) -> None:
        """Ends the watchdog: the job is over."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._writer)

    @staticmethod
    def _watch(reader: int, token: str) -> None:
        os.setsid()  # what is sent to our process group or terminal is not meant for the watchdog
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # Held copies of these would keep whoever reads our output waiting, and this pipe from ending.
        os.dup2(reader, 0)
        os.closerange(1, 65536)
        with open(0, "rb", closefd=False) as lines:
            groups = [int(line) for line in lines]
        for _ in range(3):  # a process may fork while we look
            signal_groups(groups, signal.SIGKILL)
            kill_marked(token)
            time.sleep(0.05)
