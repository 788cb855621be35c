"""The lane of a communicator's collectives: their order, deadlines, failures and counters."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from squinchcomm.collectives.call import Call
from squinchcomm.collectives.channel import Channel, Ticket
from squinchcomm.collectives.wire import Signature
from squinchcomm.errors import CollectiveTimeout, CommunicatorAborted, SquinchError
from squinchcomm.progress import Progress
from squinchcomm.work import Work

Body = Callable[[Call], None]

_ABORT_S = 5.0  # ten times what an aborted call needs to end


class Lane:
    """Numbers collectives and runs them one at a time over a channel.

    Attributes:
        channel: Where their frames go.
        sequence: Number of the next call.
    """

    def __init__(self, channel: Channel, codec_threads: int) -> None:
        self.channel = channel
        self.sequence = 0
        self._progress = Progress(f"squinchcomm-{channel.rank}")
        self._pool = ThreadPoolExecutor(codec_threads, f"squinchcomm-codec-{channel.rank}") if codec_threads > 1 else None

    def submit(self, signature: Signature, body: Body, raw_bytes: int, async_op: bool, timeout_s: float) -> Work | None:
        """Runs `body(call)`, now or, with `async_op`, when its turn comes.

        A synchronous call's deadline counts from here, an asynchronous one's from its turn.
        """

        def make() -> tuple[Callable[[], None], Work]:
            sequence = self.sequence
            self.sequence += 1
            ticket = None if async_op else Ticket(signature, self.channel.epoch, sequence, timeout_s)

            def run() -> None:
                self._execute(ticket or Ticket(signature, self.channel.epoch, sequence, timeout_s), body)
                stats = self.channel.stats
                stats.collectives += 1
                stats.raw_bytes += raw_bytes
                stats.compressed += signature.codec_id != 0

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
        error = CommunicatorAborted(f"rank {self.channel.rank} aborted: {reason}", rank=self.channel.rank)
        self._progress.if_idle(lambda: self.channel.fail(error))

    def settle(self) -> bool:
        """Waits for calls that were aborted to end; False if one does not."""
        return self._progress.drain(_ABORT_S)

    def close(self, timeout_s: float) -> bool:
        """Lets pending calls finish for at most `timeout_s`, then aborts them, and ends the threads; False if a call hangs on."""
        done = self._progress.drain(timeout_s)
        if not done:
            self.abort("the communicator was closed")
            done = self.settle()
        self._progress.close()
        if self._pool is not None:
            self._pool.shutdown(wait=done)
        return done

    def _execute(self, ticket: Ticket, body: Body) -> None:
        channel = self.channel
        channel.check_usable(ticket)
        try:
            body(Call(channel, ticket, self._pool))
        except SquinchError as error:
            channel.fail(error)
            raise
        except BaseException as error:
            # KeyboardInterrupt or a fault of ours: other ranks wait for frames that will not come.
            reason = f"{ticket.op} #{ticket.sequence} on rank {channel.rank} was broken off by {type(error).__name__}: {error}"
            channel.fail(CommunicatorAborted(reason, rank=channel.rank, op=ticket.op, sequence=ticket.sequence))
            raise
