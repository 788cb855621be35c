"""Handles of calls, as torch.distributed and its C++ parts know them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from squinchcomm.torch.callbacks import CallbackThreads, callback_level
from squinchcomm.torch.errors import translated
from squinchcomm.torch.untraced import untraced
from squinchcomm.work import Work


@untraced
class GroupWork(dist.Work):
    """A pending call of a process group. `outputs` are what its future yields, `callbacks` where that is settled."""

    def __init__(self, work: Work, outputs: Sequence[torch.Tensor], callbacks: CallbackThreads) -> None:
        super().__init__()
        self._work = work
        self._callbacks = callbacks
        self._outputs = list(outputs)
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the end of the call; raises what it raised. 0 means as long as the call's own deadline allows."""
        try:
            self._work.wait(timeout.total_seconds() or None)
        except Exception as error:
            kin = translated(error)
            raise kin from kin.__cause__
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """True once the call has ended, well or not."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """True once the call has ended well."""
        return self._work.is_completed() and self._work.exception() is None

    def exception(self) -> BaseException | None:
        """What the call raised, or None."""
        error = self._work.exception()
        return None if error is None else translated(error)

    def result(self) -> list[torch.Tensor]:
        """The output tensors, of a call that has ended."""
        return self._outputs

    def source_rank(self) -> int:
        """The rank that a received message came from."""
        if self._work.source is None:
            raise RuntimeError("only a finished receive has a source rank")
        return self._work.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A `torch.futures.Future` of the outputs. Its callbacks run in threads that do not carry the group's calls."""
        if self._future is None:
            self._future = _new_future(self._outputs)
            level = callback_level()
            self._work.on_done(lambda: self._callbacks.submit(level, self._settle))
        return self._future

    def _settle(self) -> None:
        error = self.exception()
        if error is None:
            self._future.set_result(self._outputs)
        else:
            self._future._set_unwrap_func(_raise_failure)
            self._future.set_result(_Failure(error))


class _Failure:
    """What the future of a failed call holds, in place of `set_exception`'s bare error.

    torch's C++ parts, DDP's reducer among them, know no exception set from Python: they look for tensors in whatever the future holds, by
    pickling it, and take the first without asking whether there is one. Pickling this raises the error.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> NoReturn:
        raise self.error


def _raise_failure(held: object) -> None:
    if isinstance(held, _Failure):
        raise held.error


@untraced
class FinishedWork(dist.Work):
    """A call that had ended when it returned."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns at once."""
        return True

    def synchronize(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> None:
        """None."""
        return

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return list(self._outputs)

    def get_future(self) -> Any:
        """A future that has its result."""
        future = _new_future(self._outputs)
        future.set_result(list(self._outputs))
        return future


@untraced
class JoinedWork(dist.Work):
    """Several calls handled as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for each, `timeout` at most for one; raises what the first failed one raised."""
        for work in self._works:
            work.wait(timeout)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """True once all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """True once all have ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """What the first failed one raised, or None."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The output tensors of all."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        """A future of the output tensors of all."""
        collected = torch.futures.collect_all([work.get_future() for work in self._works])
        return collected.then(lambda done: [tensor for each in done.value() for tensor in each.value()])


def _new_future(outputs: Sequence[torch.Tensor]) -> Any:
    devices: list[Any] = list({tensor.device for tensor in outputs if not tensor.is_cpu})
    return torch.futures.Future(devices=devices)
