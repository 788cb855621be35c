"""Order for steps that become ready in any order: they pass as their tickets were drawn, the same on all ranks."""

from __future__ import annotations

import threading
from typing import Protocol

from squinchcomm.errors import CommunicatorAborted


class Step(Protocol):
    """What waits at a turnstile."""

    def go(self) -> None:
        """Its turn has come. Must not raise."""

    def abandon(self, error: BaseException) -> None:
        """Its turn will not come. Must not raise."""


class Turnstile:
    """Lets steps pass in the order of their tickets, and none after one has failed.

    A rank that skipped a step would take another step's bytes for the next one's.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._issued = 0
        self._next = 0
        self._ready: dict[int, Step] = {}
        self._failure: BaseException | None = None

    def ticket(self) -> int:
        """The next number.

        Raises:
            CommunicatorAborted: a step failed before.
        """
        with self._lock:
            if self._failure is not None:
                raise CommunicatorAborted(
                    f"an earlier gradient exchange failed ({self._failure}); ranks may not agree any more: "
                    "restart from a checkpoint with new process groups"
                )
            self._issued += 1
            return self._issued - 1

    def ready(self, ticket: int, step: Step) -> None:
        """Lets `step` go once all smaller tickets have, here or in the thread that brings the last of those."""
        with self._lock:
            failure = self._failure
            if failure is None:
                self._ready[ticket] = step
                while self._failure is None and self._next in self._ready:
                    self._next += 1
                    self._ready.pop(self._next - 1).go()
        if failure is not None:
            step.abandon(failure)

    def fail(self, error: BaseException) -> None:
        """Lets nothing pass any more."""
        with self._lock:
            self._failure = self._failure or error
            waiting, self._ready = list(self._ready.values()), {}
        for step in waiting:
            step.abandon(error)
