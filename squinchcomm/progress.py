"""Runs collectives one after another: in the caller's thread when nothing is pending, else in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from squinchcomm.errors import CommunicatorAborted
from squinchcomm.work import Work

Make = Callable[[], tuple[Callable[[], None], Work]]


class Progress:
    """Calls one after another, in the order of `run` and `start`; they never overlap.

    A KeyboardInterrupt may hit any line of `run`: what it sets is reset in its `finally`, and waits look again by themselves.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[tuple[Callable[[], None], Work]] = deque()
        self._busy = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def run(self, make: Make, timeout_s: float) -> None:
        """Runs a call here and now if nothing is pending, else queues it and waits. `make` is called when its turn is fixed.

        Raises:
            CollectiveTimeout: queued, and not finished after `timeout_s`.
            CommunicatorAborted: after `close`.
        """
        inline = False
        try:
            with self._lock:
                self._check_open()
                body, work = make()
                inline = not self._busy and not self._queue
                if inline:
                    self._busy = True
                else:
                    self._enqueue(body, work)
            if inline:
                body()
            else:
                work.wait(timeout_s)
        finally:
            if inline:
                self._release()

    def start(self, make: Make) -> Work:
        """Queues a call and returns its handle. Raises CommunicatorAborted after `close`."""
        with self._lock:
            self._check_open()
            body, work = make()
            self._enqueue(body, work)
        return work

    def if_idle(self, body: Callable[[], None]) -> None:
        """Runs `body` here, between calls, if none is pending."""
        with self._lock:
            if not self._busy and not self._queue:
                body()

    @property
    def pending(self) -> int:
        """Number of calls that are queued or running."""
        return len(self._queue) + self._busy

    def drain(self, timeout_s: float) -> bool:
        """Waits until no call is pending, in any thread; False if that took too long."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while self._busy or self._queue:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, 0.5))
            return True

    def close(self) -> None:
        """Takes no more calls and ends the thread, which must have none left."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _check_open(self) -> None:
        if self._closing:
            raise CommunicatorAborted("the communicator is closed")

    def _enqueue(self, body: Callable[[], None], work: Work) -> None:
        self._queue.append((body, work))
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _release(self) -> None:
        self._busy = False
        with self._lock:
            self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._lock:
                while self._busy or not self._queue:
                    if self._closing and not self._queue:
                        return
                    self._changed.wait(1.0)
                body, work = self._queue.popleft()
                self._busy = True
            error: BaseException | None = None
            try:
                body()
            except BaseException as caught:
                error = caught
            self._release()
            work.finish(error)
            del body, work, error
