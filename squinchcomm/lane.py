"""The lane of a communicator's collectives: their order, deadlines, failures and counters."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from squinchcomm.collectives.call import Call
from squinchcomm.collectives.channel import Channel, Ticket
from squinchcomm.collectives.wire import Signature
from squinchcomm.errors import CollectiveTimeout, CommunicatorAborted, SquinchError
from squinchcomm.progress import Progress
from squinchcomm.recorder import CallRecord, Recorder
from squinchcomm.work import Work

Body = Callable[[Call], None]

_ABORT_S = 5.0  # ten times what an aborted call needs to end


class Lane:
    """Numbers collectives and runs them one at a time over a channel.

    Attributes:
        channel: Where their frames go.
        sequence: Number of the next call.
    """

    def __init__(self, channel: Channel, codec_threads: int, recorder: Recorder | None) -> None:
        self.channel = channel
        self._recorder = recorder
        self.sequence = 0
        self._progress = Progress(f"squinchcomm-{channel.rank}")
        self._pool = ThreadPoolExecutor(codec_threads, f"squinchcomm-codec-{channel.rank}") if codec_threads > 1 else None

    def submit(self, signature: Signature, body: Body, nbytes: int, async_op: bool, timeout_s: float) -> Work | None:
        """Runs `body(call)`, now or, with `async_op`, when its turn comes.

        A synchronous call's deadline counts from here, an asynchronous one's from its turn. `nbytes` is the size of this rank's array.
        """

        def make() -> tuple[Callable[[], None], Work]:
            sequence = self.sequence
            self.sequence += 1
            ticket = None if async_op else Ticket(signature, self.channel.epoch, sequence, timeout_s)
            record = None
            if self._recorder is not None and self.channel.failure is None:
                record = self._recorder.open(signature, sequence, nbytes)

            def run() -> None:
                self._run(ticket or Ticket(signature, self.channel.epoch, sequence, timeout_s), signature, body, record)

            return run, Work(signature.op, sequence, self.channel.rank)

        if async_op:
            return self._progress.start(make)
        try:
            self._progress.run(make, timeout_s)
        except CollectiveTimeout as error:
            if self.channel.failure is not None:
                raise  # it ran, and this is its own deadline
            # It waited behind other calls and may still run, over memory that the caller takes back now.
            self.channel.abort(f"{error.op} #{error.sequence} was given up")
            raise
        return None

    def abort(self, reason: str) -> None:
        """Ends the call in progress and all later ones; tells the other ranks."""
        self.channel.abort(reason)
        self._progress.if_idle(self._tell_abort)

    @property
    def in_flight(self) -> int:
        """Number of collectives that are queued or running."""
        return self._progress.pending

    def settle(self) -> bool:
        """Waits for calls that were aborted to end; False if one does not."""
        return self._progress.drain(_ABORT_S)

    def close(self, timeout_s: float) -> bool:
        """Lets pending calls finish for at most `timeout_s`, then aborts them, and ends the threads; False if a call hangs on."""
        done = self._progress.drain(timeout_s)
        if not done:
            self.abort("the communicator was closed")
            done = self.settle()
        if done and self.channel.abort_reason is not None:
            self._tell_abort()  # it may have come when a call had nothing more to wait for
        self._progress.close()
        if self._pool is not None:
            self._pool.shutdown(wait=done)
        return done

    def _run(self, ticket: Ticket, signature: Signature, body: Body, record: CallRecord | None) -> None:
        """Executes a call and counts it; what it cost counts also if it fails."""
        stats = self.channel.stats
        call = Call(self.channel, ticket, self._pool)
        if record is not None and self._recorder is not None:
            self._recorder.start(record, ticket, call.waiting)
        unbroken = self.channel.failure is None
        try:
            self._execute(ticket, body, call)
        except BaseException as error:
            stats.tallies[signature.op, signature.codec_id].add(ticket.meter)
            stats.count_failure(signature.op, error)
            if record is not None:
                record.failed(error)
            if unbroken and self.channel.failure is not None:
                self._dump_failure()
            raise
        ended = time.monotonic()
        stats.count(signature.op, signature.codec_id, ticket.meter, ended - ticket.started, time.time())
        if record is not None:
            record.done(ended, stats.take_error_ratio())

    def _tell_abort(self) -> None:
        """Tells the other ranks of an abort between two calls."""
        if self.channel.failure is None:
            reason = f"rank {self.channel.rank} aborted: {self.channel.abort_reason}"
            self.channel.fail(CommunicatorAborted(reason, rank=self.channel.rank))
            self._dump_failure()

    def _dump_failure(self) -> None:
        if self._recorder is not None and self.channel.failure is not None:
            self._recorder.dump_failure(self.channel.failure)

    def _execute(self, ticket: Ticket, body: Body, call: Call) -> None:
        channel = self.channel
        try:
            channel.check_usable(ticket)
            body(call)
        except SquinchError as error:
            channel.fail(error)
            raise
        except BaseException as error:
            # KeyboardInterrupt or a fault of ours: other ranks wait for frames that will not come.
            reason = f"{ticket.op} #{ticket.sequence} on rank {channel.rank} was broken off by {type(error).__name__}: {error}"
            channel.fail(CommunicatorAborted(reason, rank=channel.rank, op=ticket.op, sequence=ticket.sequence))
            raise
