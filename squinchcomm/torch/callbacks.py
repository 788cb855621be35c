"""Threads in which the callbacks of futures run.

They are not the group's progress thread, which must stay free: a callback may start another call of the group and wait for it,
as PowerSGD's does. Futures taken by ordinary threads are settled one after another, in the order in which their calls end, by a first
thread; futures that its callbacks take, by a second one; and so on. So a callback never waits for its own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_here = threading.local()


def callback_level() -> int:
    """0 in an ordinary thread, n in the n-th callback thread of a group."""
    level: int = getattr(_here, "level", 0)
    return level


class CallbackThreads:
    """Callback threads of one group, made when first needed."""

    def __init__(self) -> None:
        self._threads: list[ThreadPoolExecutor] = []
        self._lock = threading.Lock()

    def submit(self, level: int, task: Callable[[], None]) -> None:
        """Runs `task` in the thread after `level`, after what was submitted there before."""
        with self._lock:
            while len(self._threads) <= level:
                number = len(self._threads) + 1
                self._threads.append(ThreadPoolExecutor(1, "squinchcomm-future", _set_level, (number,)))
            self._threads[level].submit(task)

    def close(self) -> None:
        """Lets the threads end once they have done what was submitted."""
        with self._lock:
            for thread in self._threads:
                thread.shutdown(wait=False)
            self._threads.clear()


def _set_level(number: int) -> None:
    _here.level = number
