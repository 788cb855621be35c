"""A call that runs in the background."""

from __future__ import annotations

import threading

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

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the call has finished and its arrays may be used.

        Raises:
            CollectiveTimeout: it runs on after `timeout_s` seconds; waiting again is allowed.
            Exception: what the call itself raised.
        """
        if not self._done.wait(timeout_s):
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

    def finish(self, error: BaseException | None = None, source: int | None = None) -> None:
        """Called by the communicator, once."""
        self._error = error
        self.source = source
        self._done.set()
