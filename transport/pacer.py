"""A slower link than the real one: what this process sends leaves at a given rate, all its transports together."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from squinchcomm.errors import ConfigError

log = logging.getLogger("squinchcomm.transport")

_OVERSLEEP_S = 60e-6  # what Linux adds to a sleep: 50 us of timer slack and the way back to the processor

_lock = threading.RLock()
_shared: Pacer | None = None
_users = 0


class Pacer:
    """Runs one action after another, each at the moment when the last of its bytes would have left a link of this rate.

    The moments come from a virtual clock, so a sleep that took too long is made up for by the next: the link is busy until
    `max(submitted at, busy until) + bytes / rate`.
    """

    def __init__(self, bits_per_s: float) -> None:
        self.bits_per_s = bits_per_s
        self.lock = threading.RLock()  # held while an action runs
        self._queue: deque[tuple[float, int, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="squinchcomm-pacer", daemon=True)
        self._thread.start()

    def submit(self, wire_bytes: int, action: Callable[[], None]) -> None:
        """Runs `action` on the pacer's thread once this many bytes more have passed the link. Never blocks."""
        with self._changed:
            self._queue.append((time.monotonic(), wire_bytes, action))
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Waits until all that was submitted before has run; False if that took too long."""
        done = threading.Event()
        self.submit(0, done.set)
        return done.wait(timeout_s)

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        busy_until = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if self._stopping:
                    return
                submitted_at, wire_bytes, action = self._queue.popleft()
            busy_until = max(submitted_at, busy_until) + wire_bytes * 8 / self.bits_per_s
            self._sleep_until(busy_until)
            try:
                with self.lock:
                    action()
            except Exception:
                log.exception("a paced send failed")

    def _sleep_until(self, moment: float) -> None:
        while not self._stopping:
            left_s = moment - time.monotonic() - _OVERSLEEP_S
            if left_s <= 0:
                return
            time.sleep(min(left_s, 0.1))


def acquire_pacer(bits_per_s: float) -> Pacer:
    """The pacer of this process, made for its first user.

    Raises:
        ConfigError: there is one already with another rate; a process has one link.
    """
    global _shared, _users
    with _lock:
        if _shared is None:
            _shared = Pacer(bits_per_s)
        elif _shared.bits_per_s != bits_per_s:
            raise ConfigError(
                f"link_rate is {_shared.bits_per_s:g} bit/s for other transports of this process; {bits_per_s:g} cannot be had too"
            )
        _users += 1
        return _shared


def release_pacer(pacer: Pacer) -> None:
    """Takes back one `acquire_pacer`; the last one stops the thread."""
    global _shared, _users
    with _lock:
        if pacer is not _shared:
            return
        _users -= 1
        if _users > 0:
            return
        _shared = None
    pacer.stop()


def _in_child() -> None:
    global _shared, _users, _lock
    _shared, _users, _lock = None, 0, threading.RLock()


os.register_at_fork(after_in_child=_in_child)
