"""From readings to a row a rank: rates since the reading before, and who is behind."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

from squinchcomm.cli.readings import Reading

# A rank is behind if the others spend this share more of their time waiting, or have waited this long with nothing in flight on it.
BEHIND_SHARE = 0.1
STUCK_S = 5.0

_MESSAGES = "send"  # counted with the collectives, but no two ranks need make the same number of them


@dataclass
class Row:
    """One rank. Rates and shares are of the time between its latest two readings, and None without two.

    Attributes:
        target: Where its metrics are from.
        rank: Its number; None before it has told.
        problem: Why there is no reading now; other values are its last ones then.
        behind: Why others seem to wait for it.
        collectives_per_s: Collectives that finished, a second.
        op: The one on which it spent most time, with its codec; the last such one if there was none since.
        sent_bytes_per_s: Over the wire.
        received_bytes_per_s: Over the wire.
        ratio: Raw bytes over sent ones, since its beginning if nothing was sent since.
        wait: Share of time in which it waited for others.
        encode: Share of time spent encoding; above 1 where several threads do.
        decode: Share of time spent decoding and reducing.
        in_flight: Collectives queued or running.
        failures: Collectives that failed so far.
        idle_s: Seconds since the latest collective finished, by its clock and that of this machine.
    """

    target: str
    rank: int | None = None
    node: str = ""
    world_size: int = 0
    problem: str | None = None
    behind: str | None = None
    collectives_per_s: float | None = None
    op: str = ""
    sent_bytes_per_s: float | None = None
    received_bytes_per_s: float | None = None
    ratio: float | None = None
    wait: float | None = None
    encode: float | None = None
    decode: float | None = None
    in_flight: int | None = None
    failures: int | None = None
    idle_s: float | None = None


@dataclass
class _Track:
    """Latest readings of one target."""

    before: Reading | None = None
    latest: Reading | None = None
    problem: str | None = None
    op: str = ""

    def take(self, reading: Reading) -> None:
        self.problem = reading.problem
        if reading.problem is not None or (self.latest is not None and reading.at <= self.latest.at):
            return
        restarted = self.latest is not None and reading.total("collectives_total") < self.latest.total("collectives_total")
        self.before, self.latest = None if restarted else self.latest, reading
        if self.before is not None:
            self.op = _busiest(self.before, reading) or self.op


@dataclass
class Board:
    """All targets seen so far."""

    _tracks: dict[str, _Track] = field(default_factory=dict)

    def take(self, readings: list[Reading]) -> None:
        """Takes new readings in, each target's in the order of their time. Targets that are not listed any more are left out."""
        targets = dict.fromkeys(reading.target for reading in readings)
        self._tracks = {target: self._tracks.get(target, _Track()) for target in targets}
        for reading in readings:
            self._tracks[reading.target].take(reading)

    def rows(self) -> list[Row]:
        """By rank, then those that have told none."""
        rows = [_row(target, track) for target, track in self._tracks.items()]
        _find_behind([row for row in rows if row.problem is None])
        return sorted(rows, key=lambda row: (row.rank is None, row.rank or 0))


def _row(target: str, track: _Track) -> Row:
    row = Row(target, problem=track.problem, op=track.op)
    latest, before = track.latest, track.before
    if latest is None:
        return row
    info = latest.info
    row.rank, row.world_size = _number(info.get("rank")), _number(info.get("world_size")) or 0
    row.node = info.get("node", "")
    row.failures = int(latest.total("collective_failures_total"))
    ended_at = latest.total("last_collective_timestamp_seconds")
    row.idle_s = max(0.0, (latest.at if row.problem is None else time.time()) - ended_at) if ended_at else None
    sent, raw = latest.total("sent_wire_bytes_total"), latest.total("raw_bytes_total")
    row.ratio = raw / sent if sent else None
    if row.problem is not None:
        return row
    row.in_flight = int(latest.total("inflight_collectives"))
    if before is not None:
        _fill_rates(row, before, latest)
    return row


def _fill_rates(row: Row, before: Reading, latest: Reading) -> None:
    def rate(name: str) -> float:
        return (latest.total(name) - before.total(name)) / (latest.at - before.at)

    messages = latest.total("collectives_total", op=_MESSAGES) - before.total("collectives_total", op=_MESSAGES)
    row.collectives_per_s = rate("collectives_total") - messages / (latest.at - before.at)
    row.sent_bytes_per_s, row.received_bytes_per_s = rate("sent_wire_bytes_total"), rate("received_wire_bytes_total")
    row.wait, row.encode, row.decode = rate("wait_seconds_total"), rate("encode_seconds_total"), rate("decode_seconds_total")
    if row.sent_bytes_per_s:
        row.ratio = rate("raw_bytes_total") / row.sent_bytes_per_s


def _busiest(before: Reading, latest: Reading) -> str:
    """Operation on which most time was spent in between, with the codec of most of its bytes; "" if none finished."""
    spent = {
        labels["op"]: value - before.total("collective_duration_seconds_sum", op=labels["op"])
        for labels, value in latest.samples.get("collective_duration_seconds_sum", [])
    }
    op = max(spent, key=lambda each: spent[each], default="")
    if not spent.get(op):
        return ""
    raw = {
        labels["codec"]: value - before.total("raw_bytes_total", op=op, codec=labels["codec"])
        for labels, value in latest.samples.get("raw_bytes_total", [])
        if labels["op"] == op
    }
    codec = max(raw, key=lambda each: raw[each], default="none")
    return op if codec == "none" else f"{op} {codec}"


def _find_behind(rows: list[Row]) -> None:
    """Marks ranks for which the others wait: in a call that they have not made, or more than they wait themselves."""
    for row in rows:
        others = [each for each in rows if each is not row]
        stuck_s = [each.idle_s or 0.0 for each in others if each.in_flight]
        if row.in_flight == 0 and len(stuck_s) * 2 >= len(rows) and min(stuck_s, default=0.0) >= STUCK_S:
            row.behind = f"behind: others wait for {min(stuck_s):.0f} s"
    if any(row.behind for row in rows):
        return
    waits = [row.wait for row in rows]
    for place, wait in enumerate(waits):
        others_wait = [each for each in (*waits[:place], *waits[place + 1 :]) if each is not None]
        if wait is not None and others_wait and median(others_wait) - wait >= BEHIND_SHARE:
            rows[place].behind = f"behind: others wait {median(others_wait):.0%} of the time, it {wait:.0%}"


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
