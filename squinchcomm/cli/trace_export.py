"""Recordings as a trace in Chrome's format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

A process is a rank. It has a track of its collectives and, if chunks were recorded, tracks of their encoding and decoding, and an
arrow-like span of each chunk on the wire, from the moment its sender handed it over to the one at which its receiver took it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from squinchcomm.cli.trace_compare import Clocks, Verdict
from squinchcomm.recordings import CallLine, ChunkLine, Recording

Event = dict[str, Any]

_TRACKS_A_GROUP = 1000
_KINDS = ("encode", "decode")


def chrome_trace(verdicts: list[Verdict]) -> dict[str, Any]:
    """The whole trace. Times are microseconds since the earliest call."""
    events: list[Event] = []
    offsets: dict[str, float | None] = {}
    for index, verdict in enumerate(verdicts):
        clocks = Clocks(verdict.ranks)
        offsets |= clocks.offsets_s
        for rank, recording in verdict.ranks.items():
            events += _Tracks(rank, recording, clocks, index * _TRACKS_A_GROUP).events()
        events += _wire(verdict, clocks)
    timed = [event for event in events if "ts" in event]
    begin = min((event["ts"] for event in timed), default=0.0)
    for event in timed:
        event["ts"] = round((event["ts"] - begin) * 1e6, 3)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clock_offsets_s": offsets}}


class _Tracks:
    """The tracks of one rank in one communicator."""

    def __init__(self, rank: int, recording: Recording, clocks: Clocks, first: int) -> None:
        self._rank = rank
        self._recording = recording
        self._clocks = clocks
        self._first = first

    def events(self) -> Iterator[Event]:
        """Names of the tracks, then what is on them."""
        header = self._recording.header
        yield self._name("process_name", f"rank {self._rank} ({header.host}, process {header.pid})", 0)
        yield self._name("thread_name", f"collectives of {header.group}", self._first)
        for call in self._recording.calls.values():
            if call.started is not None:
                yield self._call(call)
        for place, kind in enumerate(_KINDS):
            chunks = [chunk for chunk in self._recording.chunks if chunk.what == kind]
            for lane, members in enumerate(_lanes(chunks)):
                track = self._first + 1 + place * (_TRACKS_A_GROUP // 2) + lane
                yield self._name("thread_name", kind, track)
                yield from (self._chunk(chunk, track) for chunk in members)

    def _name(self, what: str, name: str, track: int) -> Event:
        return {"ph": "M", "name": what, "pid": self._rank, "tid": track, "args": {"name": name}}

    def _span(self, name: str, category: str, track: int, started: float, seconds: float, details: dict[str, Any]) -> Event:
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": self._rank,
            "tid": track,
            "ts": self._clocks.time(self._recording, started),
            "dur": round(seconds * 1e6, 3),
            "args": details,
        }

    def _call(self, call: CallLine) -> Event:
        assert call.started is not None
        ended = call.ended or self._recording.header.written
        details = {
            "call": call.call,
            "what": call.describe(),
            "state": call.state,
            "queued_ms": round((call.started - call.queued) * 1e3, 3),
            "encode_ms": round(call.encode_s * 1e3, 3),
            "decode_ms": round(call.decode_s * 1e3, 3),
            "wait_ms": round(call.wait_s * 1e3, 3),
            "waits_ms": {f"rank {peer}": round(seconds * 1e3, 3) for peer, seconds in call.waits.items()},
            "sent_bytes": call.sent,
        }
        if call.message:
            details["error"] = f"{call.error}: {call.message}"
        return self._span(f"{call.op} #{call.call}", "collective", self._first, call.started, ended - call.started, details)

    def _chunk(self, chunk: ChunkLine, track: int) -> Event:
        details = {"call": chunk.call, "peer": chunk.peer, "phase": chunk.phase, "chunk": chunk.chunk}
        return self._span(f"{chunk.what} {chunk.chunk}", chunk.what, track, chunk.at, chunk.seconds, details)


def _lanes(chunks: list[ChunkLine]) -> list[list[ChunkLine]]:
    """Chunks on as few tracks as hold them without overlap: threads work on several at once."""
    lanes: list[list[ChunkLine]] = []
    for chunk in sorted(chunks, key=lambda each: each.at):
        for lane in lanes:
            if lane[-1].at + lane[-1].seconds <= chunk.at:
                lane.append(chunk)
                break
        else:
            lanes.append([chunk])
    return lanes


def _wire(verdict: Verdict, clocks: Clocks) -> Iterator[Event]:
    """A span, which may overlap others, for each chunk whose sender and receiver both recorded it."""
    arrived = {
        _route(chunk.peer, rank, chunk): (recording, chunk) for rank, recording, chunk in _moved(verdict.ranks, "received")
    }
    for rank, recording, chunk in _moved(verdict.ranks, "sent"):
        route = _route(rank, chunk.peer, chunk)
        if route not in arrived:
            continue
        there, received = arrived[route]
        common = {
            "name": f"chunk {chunk.chunk} to rank {chunk.peer}",
            "cat": "wire",
            "id": "-".join(map(str, (verdict.group, *route))),
            "pid": rank,
            "tid": 0,
        }
        sent_at = clocks.time(recording, chunk.at)
        details = {"call": chunk.call, "phase": chunk.phase, "bytes": chunk.nbytes}
        yield {"ph": "b", "ts": sent_at, "args": details, **common}
        yield {"ph": "e", "ts": max(sent_at, clocks.time(there, received.at)), **common}


def _moved(ranks: dict[int, Recording], what: str) -> Iterable[tuple[int, Recording, ChunkLine]]:
    return ((rank, each, chunk) for rank, each in ranks.items() for chunk in each.chunks if chunk.what == what)


def _route(source: int, target: int, chunk: ChunkLine) -> tuple[int, int, int, int, int]:
    return chunk.call, source, target, chunk.phase, chunk.chunk
