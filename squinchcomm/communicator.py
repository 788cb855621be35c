"""The communicator: one group of ranks and the calls they make together."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from squinchcomm import roster
from squinchcomm.arguments import check_overlap, check_part, on_root, part_sizes, same_dtype
from squinchcomm.arrays import Flat, flatten
from squinchcomm.collectives import movement
from squinchcomm.collectives.call import Call
from squinchcomm.collectives.channel import Channel
from squinchcomm.collectives.coder import PlainCoder, mix
from squinchcomm.collectives.exchange import direct_allreduce, runs_direct
from squinchcomm.collectives.p2p import Message, PointToPoint
from squinchcomm.collectives.plan import Plan
from squinchcomm.collectives.reduction import check_reduction
from squinchcomm.collectives.wire import Signature
from squinchcomm.config import Config
from squinchcomm.crossover import Crossover
from squinchcomm.ending import close_at_exit
from squinchcomm.errors import CommunicatorAborted
from squinchcomm.kernels.codec import Codec
from squinchcomm.lane import Body, Lane
from squinchcomm.recorder import Recorder
from squinchcomm.stats import Stats
from squinchcomm.strategy import Strategy
from squinchcomm.transport.base import Backend, Transport
from squinchcomm.work import Work

log = logging.getLogger("squinchcomm")


class Communicator:
    """A group of ranks. Made by `squinchcomm.init` or `split`; every rank makes the same calls in the same order.

    Arrays are NumPy arrays or torch CPU tensors of any shape, contiguous or not; results are written in place, and reach all
    ranks with the same bits. Each collective takes `async_op=True` to return a `Work` at once; arrays of a pending call must not be
    touched. `timeout_s` defaults to the configuration's. After a call has failed its output holds undefined values and the
    communicator is broken: later calls raise `CommunicatorAborted`.

    Every call can raise:
        PeerLost: a peer it needs died, broke its connection or fell silent.
        CollectiveTimeout: it did not finish in time.
        MismatchError: another rank made a different call.
        WireFormatError: a frame was damaged on its way.
        CommunicatorAborted: aborted, closed, or broken by an earlier failure.
        TypeError, ValueError: an argument is wrong; nothing was sent, the communicator stays usable on this rank.

    Attributes:
        rank: This process's number in the group.
        world_size: Number of ranks.
        hosts: Host identity of each rank; equal ones share a machine.
        config: Settings.
        stats: Counters.
    """

    def __init__(self, backend: Backend, transports: tuple[Transport, Transport], config: Config, epoch: int) -> None:
        collectives, messages = transports
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self.hosts = collectives.hosts
        self.config = config
        self.stats = Stats()
        self._backend = backend
        self._transports = transports
        self._channel = Channel(collectives, epoch, self.stats)
        self._recorder = None
        if config.recorder:
            self._recorder = Recorder(config, f"{epoch:08x}", self.rank, self.hosts, collectives.name)
        threads = config.resolved_codec_threads(self.hosts.count(self.hosts[self.rank]))
        self._lane = Lane(self._channel, threads, self._recorder)
        self._messages = PointToPoint(messages, epoch, self.stats)
        self._strategy = Strategy(config, collectives, self.stats)
        self._pid = os.getpid()
        self._closed = False
        self._attempts = 0  # to shrink
        self._close_lock = threading.Lock()
        roster.enter(self)
        if collectives.holds_sent:
            close_at_exit(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._channel.failure else "open"
        return f"<Communicator rank {self.rank} of {self.world_size}, {self._transports[0].name}, {state}>"

    @property
    def crossover(self) -> Crossover | None:
        """Where the codec "auto" starts to compress; None if the configuration's codec is another."""
        return self._strategy.crossover

    @crossover.setter
    def crossover(self, known: Crossover) -> None:
        self._strategy.crossover = known

    @property
    def sequence(self) -> int:
        """Number of collectives that were called so far."""
        return self._lane.sequence

    @property
    def in_flight(self) -> int:
        """Number of collectives that are queued or running."""
        return 0 if self._closed else self._lane.in_flight

    @property
    def connected_peers(self) -> int:
        """Number of other ranks that are not lost; 0 after `close`."""
        return 0 if self._closed else self.world_size - 1 - len(self._transports[0].lost)

    @property
    def broken(self) -> bool:
        """Whether a call has failed, so that later ones raise CommunicatorAborted."""
        return self._channel.failure is not None

    @property
    def encrypted(self) -> bool:
        """Whether what it sends is encrypted."""
        return self._transports[0].encrypted

    @property
    def transport_name(self) -> str:
        """What carries its bytes, such as "zmq"."""
        return self._transports[0].name

    def counted(self) -> Stats:
        """`stats`, brought up to date with what the transports count."""
        self.stats.rejected_peers = sum(transport.rejected_peers for transport in self._transports)
        self.stats.unshared_payloads = sum(transport.unshared_payloads for transport in self._transports)
        return self.stats

    # --- reductions -------------------------------------------------------------------------------------------------

    def allreduce(
        self,
        array: Any,
        op: str = "sum",
        *,
        codec: str | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Combines `array` over all ranks, in place.

        Args:
            array: Same shape and dtype on all ranks.
            op: "sum", "avg", "min", "max", "product"; "band", "bor" or "bxor" for integers and bool; "premul_sum", a sum of
                what each rank has multiplied by a factor of its own. "avg" is finite wherever the mean is, also if the sum
                is not; with the codecs bf16 and int8 it is not finite there.
            codec: Codec for the bytes on the wire, such as "squinch6"; None takes the configuration's.
            async_op: Return a Work at once.
            timeout_s: Seconds until `CollectiveTimeout`.

        Raises:
            ConfigError: the codec is unknown or cannot serve this dtype or op.
        """
        flat = flatten(array, "array", writable=True)
        check_reduction(op, flat.data.dtype)
        chosen = self._strategy.codec(codec, flat.data, op, "allreduce")
        signature = Signature("allreduce", op, flat.data.dtype, flat.data.size, flat.shape, **_codec_fields(chosen))

        def body(call: Call) -> None:
            coder = self._strategy.coder(chosen, flat.data.dtype, op, call)
            if runs_direct(chosen.lossless, flat.data.nbytes, self.world_size):
                direct_allreduce(call, coder, flat.data)
            elif self.world_size > 1:
                self._strategy.reduction(call, coder, flat.data).allreduce()
            flat.write_back()

        return self._submit(signature, body, flat.data.nbytes, async_op, timeout_s)

    def reduce(
        self, array: Any, root: int = 0, op: str = "sum", *, async_op: bool = False, timeout_s: float | None = None
    ) -> Work | None:
        """Combines `array` over all ranks into `array` of rank `root`, losslessly; other ranks' arrays stay as they are."""
        self._check_rank(root, "root")
        flat = flatten(array, "array", writable=self.rank == root)
        check_reduction(op, flat.data.dtype)
        signature = Signature("reduce", op, flat.data.dtype, flat.data.size, flat.shape, root=root)

        def body(call: Call) -> None:
            coder = PlainCoder(flat.data.dtype, op, self.world_size)
            if self.world_size > 1:
                self._strategy.exchange(call, coder, flat.data).reduce(root)
            if self.rank == root:
                flat.write_back()

        return self._submit(signature, body, flat.data.nbytes, async_op, timeout_s)

    def reduce_scatter(
        self,
        output: Any,
        input: Any,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        codec: str | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Combines `input` over all ranks and leaves part r of the result in `output` of rank r.

        Args:
            output: This rank's part; its size is `counts[rank]`.
            input: All parts, one after the other; same size on all ranks; only read.
            op: As for `allreduce`.
            counts: Elements of each part; None means equal parts.
            codec: As for `allreduce`. The result is not encoded again: it is as exact as the contributions.
            async_op: Return a Work at once.
            timeout_s: Seconds until `CollectiveTimeout`.
        """
        source = flatten(input, "input", writable=False)
        target = flatten(output, "output", writable=True)
        check_reduction(op, source.data.dtype)
        same_dtype(source, target)
        parts = part_sizes(counts, self.world_size, source.data.size, "input")
        check_part(target, "output", parts, self.rank, "input")
        check_overlap(source, target, _slot(parts, self.rank), "input")
        chosen = self._strategy.codec(codec, source.data, op, "reduce_scatter")
        signature = Signature(
            "reduce_scatter", op, source.data.dtype, source.data.size, parts=tuple(parts), **_codec_fields(chosen)
        )

        def body(call: Call) -> None:
            coder = self._strategy.coder(chosen, source.data.dtype, op, call)
            if self.world_size > 1:
                self._strategy.reduction(call, coder, source.data, parts).reduce_scatter(target.data)
            else:
                target.data[:] = source.data
            target.write_back()

        return self._submit(signature, body, source.data.nbytes, async_op, timeout_s)

    def all_gather(
        self,
        output: Any,
        input: Any,
        *,
        counts: Sequence[int] | None = None,
        codec: str | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Concatenates `input` of all ranks, in rank order, into `output` on every rank.

        Args:
            output: All parts, one after the other.
            input: This rank's part; its size is `counts[rank]`. It may be that part of `output`.
            counts: Elements of each rank's part; None means equal parts.
            codec: Codec for the bytes on the wire; None means lossless, whatever the configuration says.
            async_op: Return a Work at once.
            timeout_s: Seconds until `CollectiveTimeout`.
        """
        source = flatten(input, "input", writable=False)
        target = flatten(output, "output", writable=True)
        same_dtype(source, target)
        parts = part_sizes(counts, self.world_size, target.data.size, "output")
        check_part(source, "input", parts, self.rank, "output")
        check_overlap(source, target, _slot(parts, self.rank), "output")
        chosen = self._strategy.codec(codec or "none", target.data, "", "all_gather")
        signature = Signature(
            "all_gather", "", target.data.dtype, target.data.size, parts=tuple(parts), **_codec_fields(chosen)
        )

        def body(call: Call) -> None:
            if self.world_size > 1:
                coder = self._strategy.coder(chosen, target.data.dtype, "", call)
                self._strategy.exchange(call, coder, target.data, parts).all_gather(source.data)
            else:
                target.data[:] = source.data
            target.write_back()

        return self._submit(signature, body, target.data.nbytes, async_op, timeout_s)

    # --- data movement: always lossless -----------------------------------------------------------------------------

    def barrier(self, *, async_op: bool = False, timeout_s: float | None = None) -> Work | None:
        """Returns when all ranks have called it."""
        return self._submit(Signature("barrier"), movement.barrier, 0, async_op, timeout_s)

    def broadcast(self, array: Any, root: int = 0, *, async_op: bool = False, timeout_s: float | None = None) -> Work | None:
        """Copies `array` of rank `root` into `array` of all ranks; same shape and dtype everywhere."""
        self._check_rank(root, "root")
        flat = flatten(array, "array", writable=self.rank != root)
        signature = Signature("broadcast", "", flat.data.dtype, flat.data.size, flat.shape, root=root)

        def body(call: Call) -> None:
            movement.broadcast(call, flat.data.view(np.uint8), root, self._strategy.movement_bytes)
            if self.rank != root:
                flat.write_back()

        return self._submit(signature, body, flat.data.nbytes, async_op, timeout_s)

    def gather(
        self, input: Any, output: Any = None, root: int = 0, *, async_op: bool = False, timeout_s: float | None = None
    ) -> Work | None:
        """Concatenates `input` of all ranks, of one size, into `output` on rank `root`; elsewhere `output` is ignored."""
        self._check_rank(root, "root")
        source = flatten(input, "input", writable=False)
        target = on_root(output, "output", source, self.world_size, writable=True) if self.rank == root else None
        if target is not None:
            check_overlap(source, target, _slot([source.data.size] * self.world_size, root), "output")
        signature = Signature("gather", "", source.data.dtype, source.data.size * self.world_size, root=root)

        def body(call: Call) -> None:
            own = source.data.view(np.uint8)
            movement.gather(call, own, target.data.view(np.uint8) if target else None, root, self._strategy.movement_bytes)
            if target:
                target.write_back()

        return self._submit(signature, body, source.data.nbytes, async_op, timeout_s)

    def scatter(
        self, output: Any, input: Any = None, root: int = 0, *, async_op: bool = False, timeout_s: float | None = None
    ) -> Work | None:
        """Gives rank r part r of `input` of rank `root` in `output`; elsewhere `input` is ignored."""
        self._check_rank(root, "root")
        target = flatten(output, "output", writable=True)
        source = on_root(input, "input", target, self.world_size, writable=False) if self.rank == root else None
        if source is not None:
            check_overlap(source, target, _slot([target.data.size] * self.world_size, root), "input")
        signature = Signature("scatter", "", target.data.dtype, target.data.size * self.world_size, root=root)

        def body(call: Call) -> None:
            own = target.data.view(np.uint8)
            movement.scatter(call, own, source.data.view(np.uint8) if source else None, root, self._strategy.movement_bytes)
            target.write_back()

        return self._submit(signature, body, target.data.nbytes, async_op, timeout_s)

    def all_to_all(
        self,
        output: Any,
        input: Any,
        *,
        output_counts: Sequence[int] | None = None,
        input_counts: Sequence[int] | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Sends part p of `input` to rank p and receives part p of `output` from rank p.

        Args:
            output: Its parts have `output_counts` elements, or are equal.
            input: Its parts have `input_counts` elements, or are equal. Must not overlap `output`.
            output_counts: What each peer sends to this rank.
            input_counts: What this rank sends to each peer.
            async_op: Return a Work at once.
            timeout_s: Seconds until `CollectiveTimeout`.
        """
        source = flatten(input, "input", writable=False)
        target = flatten(output, "output", writable=True)
        same_dtype(source, target)
        check_overlap(source, target, None, "input")
        sends = part_sizes(input_counts, self.world_size, source.data.size, "input")
        takes = part_sizes(output_counts, self.world_size, target.data.size, "output")
        if sends[self.rank] != takes[self.rank]:
            raise ValueError(
                f"input_counts[{self.rank}] is {sends[self.rank]} but output_counts[{self.rank}] is {takes[self.rank]}: "
                "a rank's part for itself has one size"
            )
        # Part sizes differ from rank to rank, so the signature cannot hold them; receivers compare them.
        signature = Signature("all_to_all", "", source.data.dtype)

        def body(call: Call) -> None:
            size = source.data.itemsize
            bounds = [[size * offset for offset in Plan.uneven(parts, 1, 1).bounds] for parts in (takes, sends)]
            movement.all_to_all(
                call,
                target.data.view(np.uint8),
                source.data.view(np.uint8),
                bounds[0],
                bounds[1],
                self._strategy.movement_bytes,
            )
            target.write_back()

        return self._submit(signature, body, source.data.nbytes, async_op, timeout_s)

    # --- point to point ---------------------------------------------------------------------------------------------

    def send(
        self, array: Any, dst: int, tag: int = 0, *, async_op: bool = False, timeout_s: float | None = None
    ) -> Work | None:
        """Sends `array` to rank `dst`, whose `recv` names the same tag, dtype and element count.

        Returns when the receiver has made its call and `array` may be changed. Independent of the order of collectives.
        """
        self._check_rank(dst, "dst")
        work = self._message(flatten(array, "array", writable=False), dst, tag, True, timeout_s)
        if async_op:
            return work
        work.wait()
        return None

    def recv(
        self, array: Any, src: int | None = None, tag: int = 0, *, async_op: bool = False, timeout_s: float | None = None
    ) -> Work | int | None:
        """Receives into `array` from rank `src`, or from any rank if None; returns the source's rank (its Work has it as `source`)."""
        if src is not None:
            self._check_rank(src, "src")
        work = self._message(flatten(array, "array", writable=True), src, tag, False, timeout_s)
        if async_op:
            return work
        work.wait()
        return work.source

    def _message(self, flat: Flat, peer: int | None, tag: int, outgoing: bool, timeout_s: float | None) -> Work:
        self._check_alive()
        if peer == self.rank:
            raise ValueError(f"{'dst' if outgoing else 'src'} is this rank ({peer}); a rank cannot message itself")
        if not isinstance(tag, int | np.integer) or not 0 <= tag < 1 << 32:
            raise ValueError(f"tag must be an integer from 0 to 2**32 - 1, not {tag!r}")
        timeout = self._timeout(timeout_s)
        work = Work("send" if outgoing else "recv", 0, self.rank)
        self._messages.post(
            Message(
                work,
                flat.data.view(np.uint8),
                flat.data.dtype,
                flat.data.size,
                int(tag),
                None if peer is None else int(peer),
                time.monotonic() + timeout,
                timeout,
                outgoing=outgoing,
                arrived=None if outgoing else flat.write_back,
            )
        )
        return work

    # --- groups, end ------------------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """Makes a communicator for each color, of the ranks that gave it, ordered by `key` (this rank if None), then rank.

        A collective call. Ranks that give None take part in the call and get None. A rank that dies while the new group
        connects is PeerLost within about 5 s.
        """
        from squinchcomm import joining

        epoch = mix(self._channel.epoch, self._lane.sequence) & 0xFFFFFFFF
        return joining.split(self, self._backend, epoch, color, key)

    def shrink(self, timeout_s: float | None = None) -> Communicator:
        """Makes a communicator of the ranks that are left, in the order of their ranks here, after a call has failed.

        All of them have to call it. Pending calls of this communicator end with CommunicatorAborted; it stays to be closed. Without a
        failure it gives a new communicator of the same ranks. After an error of its own it can be called again.

        Args:
            timeout_s: Seconds for the others to call it; the configuration's if None.

        Raises:
            CollectiveTimeout: a rank that is not lost did not call it in time; names it.
            PeerLost: another rank died while the new group formed, or the others take this rank for lost.
        """
        from squinchcomm import joining

        self._check_alive()
        timeout = self._timeout(timeout_s)
        self.abort("shrink() was called")
        if not self._lane.settle():
            raise CommunicatorAborted(f"shrink on rank {self.rank}: a call in progress does not end", rank=self.rank)
        self._attempts += 1
        smaller = joining.shrink(self, self._backend, self._transports[0], self._channel.epoch, self._attempts, timeout)
        self.stats.shrinks += 1
        return smaller

    def abort(self, reason: str = "abort() was called") -> None:
        """Makes pending and later calls on this rank raise CommunicatorAborted, within 0.5 s; peers that wait for this rank learn of it.

        Any thread; idempotent.
        """
        self._check_process()
        if not self._closed:
            self._lane.abort(reason)
            self._messages.stop(CommunicatorAborted(f"aborted: {reason}", rank=self.rank), tell_peers=True)

    def close(self) -> None:
        """Finishes pending calls, says goodbye to peers, frees sockets and threads. Idempotent."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        if self._pid != os.getpid():
            return
        idle = self._lane.close(self.config.timeout_s)
        quiet = self._messages.stop(CommunicatorAborted("the communicator was closed", rank=self.rank), tell_peers=False)
        if self._recorder is not None:
            self._recorder.close()
        roster.leave(self)
        for transport, unused in zip(self._transports, (idle, quiet), strict=True):
            if unused:
                transport.close()
            else:  # closing what another thread is using would end the process
                log.error("rank %d: a call does not end, so its %s transport stays open", self.rank, transport.name)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self._closed:
            self.abort(f"rank {self.rank} left with {type(error).__name__}: {error}"[:500])
        self.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _submit(self, signature: Signature, body: Body, nbytes: int, async_op: bool, timeout_s: float | None) -> Work | None:
        self._check_alive()
        return self._lane.submit(signature, body, nbytes, async_op, self._timeout(timeout_s))

    def _check_alive(self) -> None:
        self._check_process()
        if self._closed:
            raise CommunicatorAborted("the communicator is closed", rank=self.rank)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise CommunicatorAborted(
                f"this communicator belongs to process {self._pid}; a forked child ({os.getpid()}) must make its own with squinchcomm.init",
                rank=self.rank,
            )

    def _check_rank(self, rank: int, name: str) -> None:
        if not isinstance(rank, int | np.integer) or not 0 <= rank < self.world_size:
            raise ValueError(f"{name} must be a rank from 0 to {self.world_size - 1}, not {rank!r}")

    def _timeout(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self.config.timeout_s
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, not {timeout_s!r}")
        return timeout_s


def _slot(parts: Sequence[int], rank: int) -> slice:
    start = sum(parts[:rank])
    return slice(start, start + parts[rank])


def _codec_fields(codec: Codec) -> dict[str, Any]:
    return {"codec_id": codec.wire_id, "codec_version": codec.wire_version}
