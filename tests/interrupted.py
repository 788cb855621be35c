"""A world of one whose calls are interrupted again and again, as by Ctrl-C; then a call of another thread and a close."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import Any

import numpy as np

import squinchcomm


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> None:
    comm = squinchcomm.init()
    signal.signal(signal.SIGALRM, interrupt)
    hits = 0
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005)
            for _ in range(100):
                with contextlib.suppress(squinchcomm.CommunicatorAborted):
                    comm.allreduce(np.ones(10))
        except KeyboardInterrupt:
            hits += 1
    signal.setitimer(signal.ITIMER_REAL, 0)

    def probe() -> None:
        with contextlib.suppress(squinchcomm.SquinchError):
            comm.barrier(timeout_s=1.0)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(5.0)
    assert not thread.is_alive(), "a call hangs"
    comm.close()
    print(hits, "interrupts")


if __name__ == "__main__":
    main()
