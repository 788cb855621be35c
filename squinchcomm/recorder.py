"""The flight recorder: the latest collectives of a communicator, in memory, written to a file when something goes wrong.

It costs about a microsecond a call. Files are written into SQUINCH_RECORDER_DIR after a timeout, an abort or another failure, when
the communicator is closed, on SIGUSR1 and SIGTERM unless the application handles them, and by `dump`. `squinchcomm trace` compares them.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection
from pathlib import Path

from squinchcomm import recordings, signals
from squinchcomm.collectives.channel import Ticket, codec_name
from squinchcomm.collectives.wire import Signature
from squinchcomm.config import Config, settings
from squinchcomm.errors import ConfigError
from squinchcomm.kernels.dtypes import dtype_name
from squinchcomm.recordings import DONE, FAILED, QUEUED, RUNNING, CallLine, ChunkLine, Header, Line

log = logging.getLogger("squinchcomm")

_MAX_MESSAGE_CHARS = 1000

_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
_lock = threading.Lock()


class CallRecord:
    """One collective while it is remembered. Times are `time.monotonic()`."""

    __slots__ = (
        "due",
        "ended",
        "error",
        "error_ratio",
        "nbytes",
        "queued",
        "sequence",
        "signature",
        "started",
        "state",
        "ticket",
    )

    def __init__(self, signature: Signature, sequence: int, nbytes: int) -> None:
        self.signature = signature
        self.sequence = sequence
        self.nbytes = nbytes
        self.queued = time.monotonic()
        self.state = QUEUED
        self.ticket: Ticket | None = None
        self.due: Collection[int] = ()
        self.started = 0.0
        self.ended = 0.0
        self.error_ratio: float | None = None
        self.error: tuple[str, str, int | None] | None = None  # kind, text, peer: the error itself holds on to arrays

    def done(self, ended: float, error_ratio: float | None) -> None:
        """Notes its success, and what its encoding lost if that was looked at."""
        self.ended = ended
        self.error_ratio = error_ratio
        self.due = ()
        self.state = DONE

    def failed(self, error: BaseException) -> None:
        """Notes its end by `error`."""
        self.ended = time.monotonic()
        self.due = sorted(self.due)
        self.error = type(error).__name__, str(error)[:_MAX_MESSAGE_CHARS], getattr(error, "peer", None)
        self.state = FAILED


class Recorder:
    """The latest calls of one communicator on one rank.

    Attributes:
        directory: Where files go if not told otherwise; None writes none by itself.
        failure: The first error that broke the communicator.
    """

    def __init__(self, config: Config, group: str, rank: int, hosts: tuple[str, ...], transport: str) -> None:
        self.directory = config.recorder_dir
        self.failure: str | None = None
        self._chunks = config.recorder_chunks
        self._calls: deque[CallRecord] = deque(maxlen=config.recorder)
        self._group = group
        self._rank = rank
        self._hosts = hosts
        self._transport = transport
        self._settings = {
            setting.env: str(getattr(config, name)) for name, _, setting in settings() if config.sources[name] != "default"
        }
        self._next = 0
        self._closed = False
        with _lock:
            _recorders.add(self)
        if self.directory is not None:
            self._prepare(self.directory)
            signals.write_upon(_dump_all)

    def _prepare(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("rank %d: the flight recorder cannot write to %s: %s", self._rank, directory, error.strerror or error)

    def open(self, signature: Signature, sequence: int, nbytes: int) -> CallRecord:
        """Notes that a call was made."""
        record = CallRecord(signature, sequence, nbytes)
        self._calls.append(record)
        self._next = sequence + 1
        return record

    def start(self, record: CallRecord, ticket: Ticket, due: Collection[int]) -> None:
        """Notes that its turn has come; `due` changes while it runs: the ranks that it waits for."""
        record.started = time.monotonic()
        record.ticket = ticket
        record.due = due
        ticket.waits = {}
        if self._chunks:
            ticket.chunks = []
        record.state = RUNNING

    def close(self) -> None:
        """Writes the file for the last time."""
        self._closed = True
        self.dump("closed")
        with _lock:
            _recorders.discard(self)

    def dump(self, reason: str, directory: Path | None = None) -> Path | None:
        """Writes the file of this rank, in place of an earlier one; its path, or None if there is no folder or nothing to write.

        A file that cannot be written is a warning in the log.
        """
        folder = directory or self.directory
        calls = self._snapshot()
        if folder is None or not calls:
            return None
        path = folder / f"{self._group}-rank{self._rank:05d}{recordings.SUFFIX}"
        try:
            recordings.write(path, self._lines(calls, reason))
        except OSError as error:
            log.warning("rank %d: the flight recorder cannot write %s: %s", self._rank, path, error)
            return None
        log.info("rank %d: the flight recorder wrote %d calls to %s (%s)", self._rank, len(calls), path, reason)
        return path

    def dump_failure(self, error: BaseException) -> None:
        """Writes the file after the first failure."""
        if self.failure is None:
            self.failure = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]
            path = self.dump(type(error).__name__)
            if path is not None:
                log.warning("rank %d: `squinchcomm trace %s` tells where ranks part", self._rank, path.parent)

    def _snapshot(self) -> list[CallRecord]:
        while True:
            try:
                return list(self._calls)
            except RuntimeError:  # another thread has just made a call
                continue

    def _lines(self, calls: list[CallRecord], reason: str) -> list[Line]:
        monotonic, wall = time.monotonic(), time.time()
        header = Header(
            version=recordings.VERSION,
            group=self._group,
            rank=self._rank,
            world_size=len(self._hosts),
            host=socket.gethostname(),
            machine=self._hosts[self._rank],
            pid=os.getpid(),
            transport=self._transport,
            reason=reason,
            written_at=wall,
            written=monotonic,
            next_call=self._next,
            capacity=self._calls.maxlen or 0,
            calls=len(calls),
            closed=self._closed,
            failure=self.failure,
            settings=self._settings,
        )
        names = {wire_id: codec_name(wire_id) for wire_id in {record.signature.codec_id for record in calls}}
        lines: list[Line] = [header]
        lines += [_call_line(record, names[record.signature.codec_id], wall - monotonic) for record in calls]
        for record in calls:
            lines += _chunk_lines(record)
        return lines


def dump(directory: str | Path | None = None) -> list[Path]:
    """Writes what all communicators of this process remember; the paths of the files.

    Args:
        directory: A folder, made if need be; None is the communicators' SQUINCH_RECORDER_DIR.

    Raises:
        ConfigError: no folder is given or set.
    """
    recorders = _live()
    if directory is None and not any(recorder.directory for recorder in recorders):
        raise ConfigError(
            "where to? give a directory to recorder.dump, or set SQUINCH_RECORDER_DIR before communicators are made"
        )
    folder = None if directory is None else Path(directory)
    written = (recorder.dump("asked for", folder) for recorder in recorders)
    return [path for path in written if path is not None]


def _call_line(record: CallRecord, codec: str, to_wall: float) -> CallLine:
    signature, ticket = record.signature, record.ticket
    line = CallLine(
        call=record.sequence,
        op=signature.op,
        reduction=signature.reduction,
        dtype="" if signature.dtype is None else dtype_name(signature.dtype),
        count=signature.count,
        shape=signature.shape,
        parts=signature.parts,
        root=signature.root,
        codec=codec,
        nbytes=record.nbytes,
        state=record.state,
        queued_at=record.queued + to_wall,
        queued=record.queued,
    )
    if ticket is not None:
        meter = ticket.meter
        line.started, line.ended = record.started, record.ended or None
        line.sent, line.received, line.raw = meter.sent_bytes, meter.received_bytes, meter.raw_bytes
        line.encode_s, line.decode_s, line.wait_s = meter.encode_s, meter.decode_s, meter.wait_s
        line.waits = dict(ticket.waits or {})
        line.due = sorted(record.due)
        line.error_ratio = record.error_ratio
    if record.error is not None:
        line.error, line.message, line.blames = record.error
    return line


def _chunk_lines(record: CallRecord) -> list[Line]:
    if record.ticket is None or not record.ticket.chunks:
        return []
    return [
        ChunkLine(record.sequence, what, peer, phase, chunk, at, seconds=amount)
        if what in ("encode", "decode")
        else ChunkLine(record.sequence, what, peer, phase, chunk, at, nbytes=int(amount))
        for what, peer, phase, chunk, at, amount in list(record.ticket.chunks)
    ]


def _live() -> list[Recorder]:
    with _lock:
        return list(_recorders)


def _dump_all(reason: str) -> None:
    for each in _live():
        each.dump(reason)


def _forget() -> None:
    """In a forked child: the communicators, and their files, are the parent's."""
    global _recorders, _lock
    _recorders, _lock = weakref.WeakSet(), threading.Lock()


os.register_at_fork(after_in_child=_forget)
