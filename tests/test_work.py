"""Last steps and listeners of pending calls."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from squinchcomm.communicator import Communicator
from squinchcomm.work import Work
from tests.worlds import run_world


def test_a_last_step_runs_before_waiters_return_and_listeners_after() -> None:
    work = Work("allreduce", 0, 0)
    order: list[str] = []
    work.then(lambda: (time.sleep(0.05), order.append("step"))[1])
    work.on_done(lambda: order.append("listener"))
    thread = threading.Thread(target=work.finish)
    thread.start()
    work.wait(5.0)
    assert order[0] == "step"
    thread.join()
    work.on_done(lambda: order.append("late listener"))
    assert order == ["step", "listener", "late listener"]


def test_who_waits_for_centuries_waits() -> None:
    work = Work("allreduce", 0, 0)
    threading.Timer(0.05, work.finish).start()
    work.wait(1e12)
    assert work.is_completed()


def test_a_step_after_the_end_runs_at_once_and_not_after_a_failure() -> None:
    done, failed = Work("send", 0, 0), Work("send", 1, 0)
    done.finish()
    failed.finish(OSError("gone"))
    order: list[str] = []
    done.then(lambda: order.append("step"))
    failed.then(lambda: order.append("never"))
    assert order == ["step"]
    with pytest.raises(OSError, match="gone"):
        failed.wait()


def test_what_a_step_raises_is_the_error_of_the_call() -> None:
    work = Work("recv", 0, 0)
    nothing: list[None] = []
    work.then(nothing.pop)
    work.finish()
    with pytest.raises(IndexError):
        work.wait()
    assert isinstance(work.exception(), IndexError)


def test_bitwise_reductions() -> None:
    def body(comm: Communicator) -> None:
        for kind in (np.uint8, np.int64, np.bool_):
            parts = [np.arange(rank, 9 * (rank + 1), rank + 1)[:9].astype(kind) for rank in range(comm.world_size)]
            for op, ufunc in (("band", np.bitwise_and), ("bor", np.bitwise_or), ("bxor", np.bitwise_xor)):
                array = parts[comm.rank].copy()
                comm.allreduce(array, op)
                np.testing.assert_array_equal(array, ufunc.reduce(parts))
        with pytest.raises(ValueError, match="'bxor' is not defined for float32"):
            comm.allreduce(np.ones(3, np.float32), "bxor")

    run_world(3, body)
