"""Files of the flight recorder: what their lines hold, and how they are read, damaged ones too.

A file holds the latest calls of one rank of one communicator as JSON lines: a header, then its calls in order, then, if they were
asked for, events of their chunks. Times are seconds of the rank's monotonic clock, or Unix time where a name ends in `_at`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from squinchcomm.errors import ConfigError

VERSION = 1
SUFFIX = ".jsonl"

_WHEN_WRITTEN = (
    "either no rank has written yet (they do after a failure, on SIGUSR1, on SIGTERM and at the end), "
    "or the job had another SQUINCH_RECORDER_DIR, or none"
)

QUEUED, RUNNING, DONE, FAILED = "queued", "running", "done", "failed"


class Header(msgspec.Struct, tag="header", tag_field="line", omit_defaults=True):
    """First line.

    Attributes:
        version: Of this format.
        group: Names the communicator, the same on all its ranks.
        rank: In that communicator.
        world_size: Its number of ranks.
        host: Name of the machine.
        machine: Identity of the machine; ranks of one share a monotonic clock.
        pid: Process.
        transport: Its name.
        reason: Why the file was written.
        written_at: When, Unix time.
        written: The same moment on the monotonic clock.
        next_call: Sequence number of the next call that this rank makes.
        capacity: How many calls the recorder keeps.
        calls: How many lines of calls follow.
        closed: Whether the rank had closed the communicator by then.
        failure: The first error that broke the communicator on this rank.
        settings: Variables and values of the settings that were given to this rank, not left at their default.
    """

    version: int
    group: str
    rank: int
    world_size: int
    host: str
    machine: str
    pid: int
    transport: str
    reason: str
    written_at: float
    written: float
    next_call: int
    capacity: int
    calls: int
    closed: bool = False
    failure: str | None = None
    settings: dict[str, str] = {}


class CallLine(msgspec.Struct, tag="call", tag_field="line", omit_defaults=True):
    """One collective. The first fields are its signature, on which ranks must agree.

    Attributes:
        call: Its sequence number.
        nbytes: Bytes of this rank's array.
        state: "queued", "running", "done" or "failed".
        queued_at: Unix time at which it was called.
        queued: The same moment on the monotonic clock.
        started: When it got its turn.
        ended: When it ended, well or not.
        sent: Bytes sent so far, headers included.
        received: Bytes received.
        raw: What the sent payloads would have been without a codec, bytes.
        encode_s: Seconds spent encoding.
        decode_s: Seconds spent decoding and reducing.
        wait_s: Seconds spent waiting.
        waits: Of these, for which peer: a wait is that for the peer whose frame ended it, or, if none came, in equal parts for all
            that are due.
        error: Kind of the error that ended it.
        message: Its text.
        blames: The rank that the error names.
        due: Ranks from which frames were due when it failed or when the file was written.
        error_ratio: Length of what encoding lost over length of what was encoded, in calls that were looked at.
    """

    call: int
    op: str
    reduction: str = ""
    dtype: str = ""
    count: int = 0
    shape: tuple[int, ...] | None = None
    parts: tuple[int, ...] | None = None
    root: int = 0
    codec: str = "none"
    nbytes: int = 0
    state: str = QUEUED
    queued_at: float = 0.0
    queued: float = 0.0
    started: float | None = None
    ended: float | None = None
    sent: int = 0
    received: int = 0
    raw: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    waits: dict[int, float] = {}
    error: str | None = None
    message: str | None = None
    blames: int | None = None
    due: list[int] = []
    error_ratio: float | None = None

    @property
    def signature(self) -> tuple[object, ...]:
        """What must be the same on all ranks."""
        return self.op, self.reduction, self.dtype, self.count, self.shape, self.parts, self.root, self.codec

    def describe(self) -> str:
        """The call in words, such as `allreduce of 1000 float32 (avg, squinch6)`."""
        what = f"{self.op} of {self.count} {self.dtype}" if self.dtype else self.op
        details = [self.reduction, self.codec if self.codec != "none" else ""]
        if self.shape is not None and len(self.shape) != 1:
            details.append(f"shape {list(self.shape)}")
        if self.parts is not None and len(set(self.parts)) > 1:
            details.append(f"parts {list(self.parts)}" if len(self.parts) <= 8 else f"{len(self.parts)} unequal parts")
        if self.op in ("broadcast", "reduce", "gather", "scatter"):
            details.append(f"root {self.root}")
        shown = ", ".join(filter(None, details))
        return f"{what} ({shown})" if shown else what


class ChunkLine(msgspec.Struct, tag="chunk", tag_field="line", omit_defaults=True):
    """Something that happened to one chunk: "encode" or "decode", which took `seconds`, "sent" or "received", of `nbytes`."""

    call: int
    what: str
    peer: int
    phase: int
    chunk: int
    at: float
    seconds: float = 0.0
    nbytes: int = 0


Line = Header | CallLine | ChunkLine


@dataclass(frozen=True)
class Recording:
    """One file as far as it could be read.

    Attributes:
        path: Where it is.
        header: Its first line.
        calls: By sequence number.
        chunks: Events, in the order in which they were noted.
        damage: What could not be read, in words.
    """

    path: Path
    header: Header
    calls: dict[int, CallLine]
    chunks: list[ChunkLine]
    damage: list[str]

    def wall(self, monotonic: float) -> float:
        """Unix time, by this rank's clock, of a moment of its monotonic clock."""
        return self.header.written_at + (monotonic - self.header.written)


def write(path: Path, lines: list[Line]) -> None:
    """Writes a whole file or none, with mode 0600. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encoder = msgspec.json.Encoder()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(encoder.encode_lines(lines))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> Recording:
    """Reads one file; damaged lines are left out and named.

    Raises:
        ValueError: it has no readable header of this version.
    """
    decoder = msgspec.json.Decoder(Line)
    header: Header | None = None
    calls: dict[int, CallLine] = {}
    chunks: list[ChunkLine] = []
    damage = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line = decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            damage.append(f"line {number}: {error}")
            continue
        if isinstance(line, CallLine):
            calls[line.call] = line
        elif isinstance(line, ChunkLine):
            chunks.append(line)
        elif header is None:
            header = line
    if header is None:
        raise ValueError("no header: not a file of the flight recorder, or its beginning is lost")
    if header.version != VERSION:
        raise ValueError(f"version {header.version} of the format; this is version {VERSION}")
    if len(calls) < header.calls:
        damage.append(f"{header.calls - len(calls)} of {header.calls} calls are missing")
    return Recording(path, header, calls, chunks, damage)


def read_folder(folder: Path) -> tuple[list[Recording], list[str]]:
    """All recordings in a folder, and what was wrong with files that are none.

    Raises:
        ConfigError: there is no such folder, or it holds no recording.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: give the one that SQUINCH_RECORDER_DIR named in the job; {_WHEN_WRITTEN}")
    found, problems = [], []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            found.append(read(path))
        except (OSError, ValueError) as error:
            problems.append(f"{path.name}: {error}")
    if not found:
        more = f" ({'; '.join(problems[:3])})" if problems else ""
        raise ConfigError(f"{folder} holds no recordings (*{SUFFIX}) of ranks{more}; {_WHEN_WRITTEN}")
    return found, problems
