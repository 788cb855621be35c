"""Runs collectives one after another: in the caller's thread when nothing is pending, else in a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from squinchcomm.work import Work


class Progress:
    """An ordered lane of calls. `submit` fixes the order; calls never overlap."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], None], Work]] = deque()
        self._busy = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def run(self, make: Callable[[], tuple[Callable[[], None], Work]]) -> None:
        """Runs a call here and now if the lane is idle, else queues it and waits. `make` is called when its turn is fixed."""
        with self._changed:
            body, work = make()
            inline = not self._busy and not self._queue
            if inline:
                self._busy = True
            else:
                self._enqueue(body, work)
        if not inline:
            work.wait()
            return
        try:
            body()
        finally:
            self._release()

    def start(self, make: Callable[[], tuple[Callable[[], None], Work]]) -> Work:
        """Queues a call and returns its handle."""
        with self._changed:
            body, work = make()
            self._enqueue(body, work)
        return work

    def close(self) -> None:
        """Lets the thread end once the queue is empty, and waits for it unless called from it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _enqueue(self, body: Callable[[], None], work: Work) -> None:
        self._queue.append((body, work))
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _release(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._busy and (self._queue or self._closing))
                if not self._queue:
                    return
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
