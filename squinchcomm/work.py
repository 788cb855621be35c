"""A call that runs in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable

from squinchcomm.errors import CollectiveTimeout


class Work:
    """Handle of an asynchronous call.

    Attributes:
        op: Name of the call.
        sequence: Number of the call in its communicator.
        source: After a finished `recv`, the rank that the message came from; else None.
    """

    def __init__(self, op: str, sequence: int, rank: int) -> None:
        self.op = op
        self.sequence = sequence
        self.source: int | None = None
        self._rank = rank
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._step: Callable[[], None] | None = None
        self._listeners: list[Callable[[], None]] = []

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the call has finished and its arrays may be used.

        Raises:
            CollectiveTimeout: it runs on after `timeout_s` seconds; waiting again is allowed.
            Exception: what the call itself raised.
        """
        if not self._done.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)):
            raise CollectiveTimeout(
                f"{self.op} #{self.sequence} on rank {self._rank} has not finished after {timeout_s:g} s of waiting",
                rank=self._rank,
                op=self.op,
                sequence=self.sequence,
            )
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """True once the call has finished, well or not."""
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        """What the call raised, or None: also while it runs."""
        return self._error

    def then(self, step: Callable[[], None]) -> None:
        """Makes `step` the last part of the call: it runs before waiters return, and what it raises is the call's error.

        Once, before anybody waits. It runs in the thread that ends the call, or here if that has happened; not after a failure.
        """
        with self._lock:
            if not self._done.is_set():
                self._step = step
                return
        if self._error is None:
            self._error = _raised_by(step)

    def on_done(self, listener: Callable[[], None]) -> None:
        """Runs `listener` when the call has ended, well or not: in the thread that ends it, or here if that has happened."""
        with self._lock:
            if not self._done.is_set():
                self._listeners.append(listener)
                return
        listener()

    def finish(self, error: BaseException | None = None, source: int | None = None) -> None:
        """Called by the communicator, once."""
        self.source = source
        with self._lock:  # `then` is either before this step is looked up or after everything
            if error is None and self._step is not None:
                error = _raised_by(self._step)
            self._step = None
            self._error = error
            self._done.set()
        for listener in self._listeners:
            listener()
        self._listeners.clear()


def _raised_by(step: Callable[[], None]) -> BaseException | None:
    try:
        step()
    except BaseException as error:
        return error
    return None
