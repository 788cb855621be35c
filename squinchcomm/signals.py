"""Signals upon which this process writes down what it knows: SIGUSR1, after which it goes on, and SIGTERM, by which it then ends.

A handler written in Python runs only when the main thread is in Python, which it is not while it waits for a gradient inside of torch.
So a thread of its own reads the numbers of signals from a pipe, by `signal.set_wakeup_fd`. Where the application has taken that
descriptor for itself, the handler tells the thread, as soon as Python gets to it. A signal that the application handles is its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable

_PATIENCE_S = 3.0  # for the writing before SIGTERM's end: less than launchers leave until SIGKILL
_BY_HANDLER = 0x80  # added to a number that the handler wrote, not the interpreter

_WATCHED = (signal.SIGUSR1, signal.SIGTERM)


class _Watch:
    """The pipe and its reader."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        threading.Thread(target=self._loop, name="squinchcomm-signals", daemon=True).start()

    def _loop(self) -> None:
        while numbers := os.read(self.reader, 64):
            for byte in numbers:
                number = byte & ~_BY_HANDLER
                if number not in _WATCHED or not (byte & _BY_HANDLER or signal.getsignal(number) is _on_signal):
                    continue
                if number == signal.SIGTERM:
                    self._end()
                else:
                    self.write(signal.Signals(number).name)

    def _end(self) -> None:
        writing = threading.Thread(target=self.write, args=("SIGTERM",), daemon=True)
        writing.start()
        writing.join(_PATIENCE_S)
        # signal.signal is for the main thread alone, which may be anywhere.
        ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
        os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """In a forked child, which has no reader and whose signals are not the parent's."""
        os.close(self.reader)
        os.close(self.writer)


_watch: _Watch | None = None


def write_upon(write: Callable[[str], None]) -> None:
    """Has `write` called with the name of the signal upon SIGUSR1, and upon SIGTERM before the process ends by it.

    Only signals which the application leaves at their default, and only from the main thread, where handlers can be set.
    """
    global _watch
    if threading.current_thread() is not threading.main_thread():
        return
    ours = [number for number in _WATCHED if signal.getsignal(number) is signal.SIG_DFL]
    if not ours:
        return
    if _watch is None:
        _watch = _Watch(write)
        theirs = signal.set_wakeup_fd(_watch.writer, warn_on_full_buffer=False)
        if theirs != -1:
            signal.set_wakeup_fd(theirs)
    for number in ours:
        signal.signal(number, _on_signal)


def _on_signal(number: int, _: object) -> None:
    if _watch is None:  # in a forked child
        return
    current = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(current, warn_on_full_buffer=False)
    ours = current == _watch.writer and signal.getsignal(number) is _on_signal
    # The interpreter has written this number, unless it came just above. To lose SIGTERM would be the worst; twice does no harm.
    if not ours or number == signal.SIGTERM:
        os.write(_watch.writer, bytes((number | _BY_HANDLER,)))


def _forget() -> None:
    """In a forked child: SIGTERM ends it at once, as if we were not there, and its signals do not reach the parent's pipe."""
    global _watch
    if _watch is None:
        return
    current = signal.set_wakeup_fd(-1)
    if current not in (-1, _watch.writer):
        signal.set_wakeup_fd(current)
    _watch.close()
    _watch = None
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
