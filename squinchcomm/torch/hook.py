"""A communication hook for DistributedDataParallel that moves gradients in 6 bits an element, over any backend.

A bucket is cut into pieces of about 8 MiB, of which some are on the wire while others are encoded or added, and a piece into one shard a
rank, both at the codec's tiles. Then, for every piece:

1. Each rank encodes each shard for its owner, in the thread of autograd, and the bytes start on their way.
2. When all have come, the owner adds the decoded shards and its own exact one in rank order in float32.
3. It divides by the number of ranks, encodes the mean once, and sends it to everybody.
4. Everybody, the owner included, decodes the same bytes into the bucket.

A value is quantised twice whatever the number of ranks, and all ranks hold the same bits. Steps 2 to 4 run where the backend ends its
calls, beside the rest of the backward pass. Step 3 becomes ready in an order that differs between ranks, so it passes a
turnstile and goes through a group of its own.
"""

# No postponed annotations in this module: DDP compares the hook's with classes.

import logging
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from squinchcomm import roster
from squinchcomm.arrays import flatten
from squinchcomm.collectives.coder import mix
from squinchcomm.collectives.plan import Plan
from squinchcomm.errors import CommunicatorAborted, ConfigError, SquinchError
from squinchcomm.kernels import get_codec, warm_up
from squinchcomm.kernels.codec import Codec
from squinchcomm.policy import choose_codec
from squinchcomm.torch.encoded_sum import EncodedSum
from squinchcomm.torch.error_feedback import BucketResiduals, ErrorFeedback
from squinchcomm.torch.exchange import SlotPool, exchange, twin_of
from squinchcomm.torch.guards import lossless
from squinchcomm.torch.tensors import in_place
from squinchcomm.torch.turnstile import Turnstile

log = logging.getLogger("squinchcomm")

_STATE_VERSION = 1
PIECE_BYTES = 8 << 20


class CompressState:
    """What `compress_hook` knows: how one model's gradients are compressed. Making it is a collective call of the group's ranks.

        state = CompressState(codec="squinch6")
        ddp.register_comm_hook(state, compress_hook)

    Attributes:
        codec: Name of the codec.
        buckets: How often buckets were compressed, or were not, by reason ("small", "lossless", "one rank").
        raw_bytes: Bytes of the compressed buckets.
        wire_bytes: Bytes that this rank sent for them.

    Args:
        codec: Name of a codec; "none" reduces losslessly.
        error_feedback: Add what an encoding lost to the next step's gradient. Costs 8 bytes a parameter.
        process_group: The group that DDP uses; None is the default group.
        min_compress_bytes: Smaller buckets are reduced losslessly.
        module: The model whose parameter names key the residuals of error feedback in checkpoints. Without it they are
            numbered in the order in which DDP first hands them over, the same in every run of the same model.
        seed: Key of the random numbers of stochastic codecs.

    Raises:
        ConfigError: an argument is wrong, or torch.distributed is not initialised.
    """

    def __init__(
        self,
        codec: str = "squinch6",
        error_feedback: bool = False,
        process_group: dist.ProcessGroup | None = None,
        *,
        min_compress_bytes: int = 64 << 10,
        module: torch.nn.Module | None = None,
        seed: int = 0,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("CompressState needs torch.distributed: call init_process_group on every rank first")
        group = process_group if process_group is not None else dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(f"process_group is {process_group!r}; pass a group that this rank belongs to, or None")
        if not isinstance(min_compress_bytes, int) or min_compress_bytes < 0:
            raise ConfigError(f"min_compress_bytes is {min_compress_bytes!r}; it must be a number of bytes, 0 or more")
        self.codec = get_codec(codec).name
        self.group = group
        self.min_compress_bytes = min_compress_bytes
        self.buckets: Counter[str] = Counter()
        self.raw_bytes = 0
        self.wire_bytes = 0
        self.seed = seed
        self.pool = SlotPool()
        self.turnstile = Turnstile()
        self.results_group = twin_of(group) if group.size() > 1 else group
        self.feedback = ErrorFeedback(module) if error_feedback else None
        if self.feedback is not None:
            roster.hold_residuals(self.feedback, self.codec)
        warm_up()  # not in the first backward pass
        self._calls = 0
        self._seen: set[tuple[torch.dtype, int]] = set()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this rank needs, between steps: plain tensors, numbers and text. One for each rank."""
        return {
            "version": _STATE_VERSION,
            "rank": self.group.rank(),
            "world_size": self.group.size(),
            "calls": self._calls,
            "residuals": self.feedback.state() if self.feedback else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken, bit for bit.

        Raises:
            ConfigError: it is of another rank, number of ranks or model. Leave the call out to start from zero residuals.
        """
        for field, here in (("version", _STATE_VERSION), ("rank", self.group.rank()), ("world_size", self.group.size())):
            if state.get(field) != here:
                raise ConfigError(
                    f"the state of the hook has {field} {state.get(field)!r}, but here it is {here}. Residuals belong to one rank of a "
                    "world: save and load one file a rank, or leave load_state_dict out to start from zero residuals"
                )
        if self.feedback is not None:
            self.feedback.load(state["residuals"])
        elif state["residuals"]:
            raise ConfigError(
                "the state of the hook has residuals, but error_feedback is off; make it with error_feedback=True"
            )
        self._calls = state["calls"]

    def begin(self, buffer: torch.Tensor) -> tuple[Codec, int]:
        """The codec for the next bucket, and its number."""
        if buffer.layout != torch.strided:
            raise ConfigError(f"gradients of layout {buffer.layout} cannot be compressed; make the embedding with sparse=False")
        dtype = flatten(buffer[:0].cpu(), "bucket", writable=False).data.dtype
        codec, reason = choose_codec(
            self.codec,
            self.codec,
            dtype=dtype,
            nbytes=buffer.nbytes,
            reduction="avg",
            min_compress_bytes=self.min_compress_bytes,
        )
        if self.group.size() == 1:
            reason = "one rank"
        elif codec.lossless:
            reason = reason or "lossless"
        else:
            self.raw_bytes += buffer.nbytes
            self._log_first(buffer)
        self.buckets[reason or "compressed"] += 1
        self._calls += 1
        return codec, self._calls

    def _log_first(self, buffer: torch.Tensor) -> None:
        signature = buffer.dtype, buffer.numel()
        if signature not in self._seen:
            self._seen.add(signature)
            log.info("hook: gradient buckets of %d %s compressed with %s", buffer.numel(), buffer.dtype, self.codec)


def compress_hook(
    state: CompressState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over the ranks in compressed form; for `DistributedDataParallel.register_comm_hook`.

    Returns:
        A torch Future of the bucket's buffer, averaged in place, the same bits on all ranks. Buckets that are too small are
        averaged losslessly, by `all_reduce`.

    Raises:
        ConfigError: gradients that cannot be compressed, such as sparse or complex ones.
        CommunicatorAborted: an earlier bucket failed.
    """
    if not isinstance(state, CompressState):
        raise ConfigError(f"the state registered with compress_hook is {type(state).__name__}; pass a CompressState")
    if bucket.index() == 0 and state.feedback is not None:
        state.feedback.settle()
    buffer = bucket.buffer()
    codec, number = state.begin(buffer)
    if state.group.size() == 1:
        done = _future_of(buffer)
        done.set_result(buffer)
        return done
    residuals = state.feedback.open(bucket.parameters()) if state.feedback is not None else None
    if codec.lossless:
        return _average_losslessly(state, buffer, residuals)
    return BucketAverage(state, codec, number, buffer, residuals).start()


def _average_losslessly(state: CompressState, buffer: torch.Tensor, residuals: BucketResiduals | None) -> Any:
    """As DDP does without a hook. A residual that the bucket's parameters brought from a larger bucket is paid out in full."""
    if residuals is not None:
        buffer.add_(residuals.current.to(buffer.device, buffer.dtype))
        residuals.coming.zero_()
    buffer.div_(state.group.size())
    with lossless():
        work = dist.all_reduce(buffer, group=state.group, async_op=True)

    def finish(done: Any) -> torch.Tensor:
        done.value()
        if state.feedback is not None and _is_finite(buffer):
            state.feedback.close()
        return buffer

    return work.get_future().then(finish)


class BucketAverage:
    """One bucket on its way. `outcome` is a future of its buffer, or of an error."""

    def __init__(
        self, state: CompressState, codec: Codec, number: int, buffer: torch.Tensor, residuals: BucketResiduals | None
    ) -> None:
        self.state = state
        self.codec = codec
        self.buffer = buffer
        self.residuals = residuals
        self.outcome = _future_of(buffer)
        self._seed = mix(state.seed, number)
        host, self._land = in_place(buffer)
        self._values = flatten(host, "bucket", writable=True).data
        pieces = max(1, round(self._values.nbytes / PIECE_BYTES))
        self._bounds = Plan.even(self._values.size, pieces, self._values.itemsize, codec.tile_size).bounds
        self._left = pieces
        self._failed = False
        self._lock = threading.Lock()

    def start(self) -> Any:
        """Sends all pieces on their way; the future of the whole."""
        try:
            for number, (start, stop) in enumerate(pairwise(self._bounds)):
                PieceAverage(self, self._values[start:stop], slice(start, stop), mix(self._seed, number)).start()
        except BaseException as error:
            self.state.turnstile.fail(error)
            raise
        return self.outcome.then(_raised)

    def piece_ended(self, error: BaseException | None) -> None:
        """Called once by each piece."""
        with self._lock:
            self._left -= 1
            ends = not self._failed and (error is not None or self._left == 0)
            self._failed |= error is not None
        if ends:
            self.outcome.set_result(self._whole() if error is None else error)

    def _whole(self) -> Any:
        """What all pieces together leave: the bucket, or an error."""
        try:
            if self._land is not None:
                self._land()
            if self.state.feedback is not None and _is_finite(self.buffer):
                self.state.feedback.close()
        except BaseException as error:
            return error
        return self.buffer


class PieceAverage:
    """A part of a bucket on its way through the four steps. Each step but the first runs in a thread of the backend."""

    def __init__(self, bucket: BucketAverage, values: np.ndarray, place: slice, seed: int) -> None:
        self.bucket = bucket
        self.state = state = bucket.state
        group = state.group
        self.residual: np.ndarray | None = None
        if bucket.residuals is not None:
            self.residual, self.coming = (each[place].numpy() for each in (bucket.residuals.current, bucket.residuals.coming))
        self.sum = EncodedSum(values, bucket.codec, group, state.pool, scale=1.0 / group.size(), seed=seed)

    def start(self) -> None:
        """Step 1."""
        state = self.state
        try:
            self.ticket = state.turnstile.ticket()
            if self.residual is None:
                self.sum.encode()
            else:
                self.coming[:] = self.residual
                self.sum.encode(self.coming)
            arrived = exchange(self.sum.slots, state.group)
        except BaseException:
            self.sum.release()
            raise
        state.wire_bytes += 2 * self.sum.slots.outgoing.numel()
        arrived.then(lambda done: self._guarded(self._combine, done))

    def go(self) -> None:
        """Step 3, in this piece's turn."""
        try:
            arrived = exchange(self.sum.slots, self.state.results_group)
            arrived.then(lambda done: self._guarded(self._decode, done))
        except BaseException as error:
            self._fail(error, "could not send its part of a gradient bucket")

    def abandon(self, error: BaseException) -> None:
        """Ends with the error of another piece."""
        self._end(error)

    def _combine(self) -> None:
        """Step 2, then the wait for step 3."""
        if self.residual is None:
            self.sum.combine()
        else:
            self.sum.combine_with_residual(self.residual, self.coming)
        self.state.turnstile.ready(self.ticket, self)

    def _decode(self) -> None:
        """Step 4."""
        self.sum.decode()
        self._end(None)

    def _guarded(self, step: Callable[[], None], arrived: Any) -> None:
        what = "did not get a gradient bucket of the others"
        try:
            arrived.value()
            what = f"could not average a gradient bucket of {self.bucket.buffer.nbytes} bytes"
            step()
        except BaseException as error:
            self._fail(error, what)

    def _fail(self, error: BaseException, what: str) -> None:
        if not isinstance(error, SquinchError):
            rank = self.state.group.rank()
            error = CommunicatorAborted(f"rank {rank} {what}: {type(error).__name__}: {error}", rank=rank)
        self.state.turnstile.fail(error)
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self.sum.release()
        self.bucket.piece_ended(error)


def _future_of(buffer: torch.Tensor) -> Any:
    return torch.futures.Future(devices=None if buffer.is_cpu else [buffer.device])


def _raised(done: Any) -> Any:
    """An error that a callback raises reaches DDP; one that is set as a result does not."""
    outcome = done.value()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _is_finite(values: torch.Tensor) -> bool:
    if values.numel() == 0:
        return True
    least, most = torch.aminmax(values)
    return bool(torch.isfinite(least) & torch.isfinite(most))
