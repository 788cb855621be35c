"""Threads in which the callbacks of futures run.

They are not the group's progress thread, which must stay free: a callback may start another call of the group and wait for it,
as PowerSGD's does. Futures taken by ordinary threads are settled one after another, in the order in which their calls end, by a first
thread; futures that its callbacks take, by a second one; and so on. So a callback never waits for its own thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from queue import Queue

log = logging.getLogger("squinchcomm")

_here = threading.local()
_LEAVE_S = 2.0  # what callbacks have at the end of the process, once their calls have been aborted

Task = Callable[[], None]


def callback_level() -> int:
    """0 in an ordinary thread, n in the n-th callback thread of a group."""
    level: int = getattr(_here, "level", 0)
    return level


class CallbackThreads:
    """Callback threads of one group, made when first needed.

    They do not keep a process alive whose main thread has ended: callbacks that still run then may wait for calls of ranks that have gone
    another way, so the group is aborted.

    Args:
        abort: Makes the group's calls fail.
    """

    def __init__(self, abort: Task) -> None:
        self._abort = abort
        self._pid = os.getpid()
        self._threads: list[tuple[Queue[Task | None], threading.Thread]] = []
        self._lock = threading.Lock()

    def submit(self, level: int, task: Task) -> None:
        """Runs `task` in the thread after `level`, after what was submitted there before."""
        with self._lock:
            if not self._threads:
                atexit.register(self._leave)
            while len(self._threads) <= level:
                self._threads.append(_started(len(self._threads) + 1))
            self._threads[level][0].put(task)

    def close(self) -> None:
        """Lets the threads end once they have done what was submitted."""
        if self._pid != os.getpid():
            return  # a forked child has none of the threads, and the lock as it was
        with self._lock:
            atexit.unregister(self._leave)
            for tasks, _ in self._threads:
                tasks.put(None)
            self._threads.clear()

    def _leave(self) -> None:
        if self._pid == os.getpid() and any(tasks.unfinished_tasks for tasks, _ in self._threads):
            self._abort()
            for tasks, thread in self._threads:
                tasks.put(None)
                thread.join(_LEAVE_S)


def _started(level: int) -> tuple[Queue[Task | None], threading.Thread]:
    tasks: Queue[Task | None] = Queue()
    thread = threading.Thread(target=_run, args=(level, tasks), name=f"squinchcomm-future-{level}", daemon=True)
    thread.start()
    return tasks, thread


def _run(level: int, tasks: Queue[Task | None]) -> None:
    _here.level = level
    while (task := tasks.get()) is not None:
        try:
            task()
        except Exception:
            log.exception("a future could not be settled")
        del task
        tasks.task_done()
