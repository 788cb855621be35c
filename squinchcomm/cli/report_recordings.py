"""A report from the files of the flight recorder: the latest calls of each communicator, on one time axis for all ranks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

from squinchcomm.cli.report_model import Chart, HeatMap, Points, Report, Section, Table, by_rank, quantity
from squinchcomm.cli.trace_compare import Clocks, Verdict, compare, named
from squinchcomm.errors import ConfigError
from squinchcomm.recordings import DONE, FAILED, CallLine, read_folder

MOST_SECTIONS = 8
SLOWEST = 15
_CELLS = 80
_MEETING = ("allreduce", "reduce_scatter", "all_gather", "all_to_all", "barrier")


def report(folder: Path, group: str | None) -> Report:
    """All communicators of a folder, or one; those that sent most come first.

    Raises:
        ConfigError: there is nothing to report.
    """
    recordings, problems = read_folder(folder)
    verdicts = sorted(compare(recordings), key=lambda verdict: -_sent(verdict))
    if group is not None:
        known = ", ".join(verdict.group for verdict in verdicts)
        verdicts = [verdict for verdict in verdicts if verdict.group == group]
        if not verdicts:
            raise ConfigError(f"--group {group}: there are {known}")
    notes = [f"Damaged: {text}" for text in problems]
    notes += [f"Damaged: {each.path.name}: {text}" for each in recordings for text in each.damage]
    if len(verdicts) > MOST_SECTIONS:
        left_out = ", ".join(verdict.group for verdict in verdicts[MOST_SECTIONS:])
        notes.append(f"Communicators that sent least are left out; --group shows one of them: {left_out}")
    sections = [_Communicator(verdict).section() for verdict in verdicts[:MOST_SECTIONS]]
    return Report("squinchcomm report", f"recordings in {folder}", sections, notes)


def _sent(verdict: Verdict) -> int:
    return sum(call.sent for each in verdict.ranks.values() for call in each.calls.values())


class _Communicator:
    """What is drawn of one communicator. Times are those of `Clocks`; calls count where they end."""

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._ranks = verdict.ranks
        self._clocks = Clocks(verdict.ranks)
        self._calls: dict[int, list[tuple[float, CallLine]]] = {}
        for rank, recording in verdict.ranks.items():
            ended = (call for call in recording.calls.values() if call.ended is not None)
            self._calls[rank] = [(self._clocks.time(recording, call.ended or 0.0), call) for call in ended]
        moments = [at for calls in self._calls.values() for at, _ in calls]
        started = [
            self._clocks.time(each, call.started)
            for each in verdict.ranks.values()
            for call in each.calls.values()
            if call.started is not None
        ]
        self._begin = min([*started, *moments], default=0.0)
        self._width_s = max((max(moments, default=self._begin) - self._begin) / _CELLS, 1e-4)

    def section(self) -> Section:
        """Charts, then tables."""
        verdict, calls = self._verdict, sum(map(len, self._calls.values()))
        section = Section(f"Communicator {verdict.group}", self._facts(), list(verdict.findings))
        if calls:
            section.parts += [self._bandwidth(), self._ratio(), self._error(), self._skew(), self._shares(), self._waits()]
        section.parts += [self._rank_table(), self._slowest(), self._failures(), self._settings()]
        return section

    def _facts(self) -> dict[str, str]:
        headers = [each.header for each in self._ranks.values()]
        numbers = [number for each in self._ranks.values() for number in each.calls]
        return {
            "ranks": f"{len(headers)} of {len(headers) + len(self._verdict.missing)}",
            "hosts": ", ".join(sorted({header.host for header in headers})[:4]),
            "transport": ", ".join(sorted({header.transport for header in headers})),
            "calls": f"#{min(numbers)} to #{max(numbers)}" if numbers else "none",
            "begins": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._begin)) if numbers else "-",
            "spans": quantity(self._width_s * _CELLS, "s") if numbers else "-",
            "written": ", ".join(sorted({header.reason for header in headers})),
        }

    def _cells(self, calls: Iterable[tuple[float, CallLine]], value: Callable[[CallLine], float]) -> dict[int, float]:
        """Sums of `value` by cell of the time axis."""
        sums: defaultdict[int, float] = defaultdict(float)
        for at, call in calls:
            sums[min(int((at - self._begin) / self._width_s), _CELLS - 1)] += value(call)
        return sums

    def _at(self, cell: int) -> float:
        return self._begin + (cell + 0.5) * self._width_s

    def _rates(self, rank: int, value: Callable[[CallLine], float]) -> Points:
        """Amounts a second in every cell, 0 where nothing ended, from the rank's first call to its last."""
        cells = self._cells(self._calls[rank], value)
        if not cells:
            return []
        return [(self._at(cell), cells.get(cell, 0.0) / self._width_s) for cell in range(min(cells), max(cells) + 1)]

    def _bandwidth(self) -> Chart:
        rates = {f"rank {rank}": self._rates(rank, lambda call: call.sent) for rank in self._ranks}
        note = f"Sent over the wire by each rank, headers included; each value covers {quantity(self._width_s, 's')}."
        return by_rank("Bandwidth", "B/s", note, rates)

    def _everywhere(self) -> list[tuple[float, CallLine]]:
        return [entry for calls in self._calls.values() for entry in calls]

    def _ratio(self) -> Chart:
        sent, raw = (self._cells(self._everywhere(), value) for value in (lambda call: call.sent, lambda call: call.raw))
        points = [(self._at(cell), raw[cell] / sent[cell]) for cell in sorted(sent) if sent[cell]]
        note = "Bytes that payloads would have had without a codec, over bytes sent; all ranks together."
        return Chart("Compression ratio", "", note, {"all ranks": points}, level=(1.0, "no compression"))

    def _error(self) -> Chart:
        lines: defaultdict[str, Points] = defaultdict(list)
        for at, call in self._everywhere():
            if call.error_ratio is not None:
                lines[call.codec].append((at, call.error_ratio))
        note = "Length of what encoding lost over length of what was encoded: one tile of one call in 50 on each rank."
        return Chart(
            "Quantisation error", "", note, {codec: sorted(points) for codec, points in sorted(lines.items())}, dots=True
        )

    def _skew(self) -> Chart:
        """How far apart the ranks made the same call: by cell, the median and the largest."""
        made: defaultdict[int, list[float]] = defaultdict(list)
        for recording in self._ranks.values():
            for call in recording.calls.values():
                if call.op in _MEETING:
                    made[call.call].append(self._clocks.time(recording, call.queued))
        cells: defaultdict[int, list[float]] = defaultdict(list)
        for moments in made.values():
            if len(moments) == len(self._ranks) > 1:
                cell = int((max(moments) - self._begin) / self._width_s)
                cells[min(max(cell, 0), _CELLS - 1)].append(max(moments) - min(moments))
        middle = [(self._at(cell), median(cells[cell])) for cell in sorted(cells)]
        largest = [(self._at(cell), max(cells[cell])) for cell in sorted(cells)]
        note = "Time from the first rank that made a call to the last one; only calls that every rank recorded."
        return Chart("Skew", "s", note, {"median": middle, "largest": largest} if cells else {})

    def _shares(self) -> Chart:
        """Where the time of collectives went, of all ranks together."""
        whole = self._cells(self._everywhere(), _duration)
        lines = {}
        for name in ("wait", "encode", "decode"):
            spent = self._cells(self._everywhere(), lambda call, name=name: getattr(call, f"{name}_s"))  # type: ignore[misc]
            lines[name] = [(self._at(cell), 100 * spent[cell] / whole[cell]) for cell in sorted(whole) if whole[cell]]
        note = "Share of the collectives' time; encoding and decoding of several threads add up."
        return Chart("Waiting, encoding, decoding", "%", note, lines)

    def _waits(self) -> HeatMap:
        by_peer: dict[int, defaultdict[int, float]] = {}
        for at, call in self._everywhere():
            cell = min(int((at - self._begin) / self._width_s), _CELLS - 1)
            for peer, seconds in call.waits.items():
                by_peer.setdefault(peer, defaultdict(float))[cell] += seconds
        size = max(each.header.world_size for each in self._ranks.values())
        rows = {
            f"rank {peer}": [
                (self._begin + cell * self._width_s, seconds) for cell, seconds in sorted(by_peer.get(peer, {}).items())
            ]
            for peer in range(size)
        }
        note = f"Seconds that all other ranks spent waiting for each rank, in {quantity(self._width_s, 's')}. Strong colour: it is late."
        return HeatMap("Waits for each peer", "s", note, self._width_s, rows)

    def _rank_table(self) -> Table:
        columns = [
            "rank",
            "host",
            "calls",
            "sent",
            "received",
            "ratio",
            "wait",
            "encode",
            "decode",
            "others waited for it",
            "next call",
            "state",
        ]
        waited: defaultdict[int, float] = defaultdict(float)
        for _, call in self._everywhere():
            for peer, seconds in call.waits.items():
                waited[peer] += seconds
        rows, bad = [], set()
        for place, (rank, recording) in enumerate(self._ranks.items()):
            header, calls = recording.header, [call for _, call in self._calls[rank]]
            sent, raw = sum(call.sent for call in calls), sum(call.raw for call in calls)
            whole = sum(map(_duration, calls))
            shares = [
                f"{100 * sum(getattr(call, name) for call in calls) / whole:.0f} %" if whole else "-"
                for name in ("wait_s", "encode_s", "decode_s")
            ]
            state = "failed" if header.failure else "closed" if header.closed else f"open ({header.reason})"
            rows.append(
                [
                    str(rank),
                    header.host,
                    str(len(calls)),
                    quantity(sent, "B"),
                    quantity(sum(call.received for call in calls), "B"),
                ]
                + [f"{raw / sent:.2f}" if sent else "-", *shares, quantity(waited[rank], "s"), f"#{header.next_call}", state]
            )
            if header.failure or rank in self._verdict.culprits:
                bad.add(place)
        note = "Shares of the time of its collectives. Marked: failed, or found behind or different."
        return Table("Ranks", columns, rows, ("host", "state"), note, bad)

    def _slowest(self) -> Table:
        by_call: defaultdict[int, dict[int, CallLine]] = defaultdict(dict)
        for rank, calls in self._calls.items():
            for _, call in calls:
                if call.state == DONE:
                    by_call[call.call][rank] = call
        order = sorted(by_call, key=lambda number: -max(map(_duration, by_call[number].values())))
        rows = []
        for number in order[:SLOWEST]:
            of_ranks = by_call[number]
            slow = max(of_ranks, key=lambda rank: _duration(of_ranks[rank]))
            call = of_ranks[slow]
            waits: defaultdict[int, float] = defaultdict(float)
            for each in of_ranks.values():
                for peer, seconds in each.waits.items():
                    waits[peer] += seconds
            most = max(waits, key=lambda peer: waits[peer], default=None)
            waited = "-" if most is None else f"rank {most}, {quantity(waits[most], 's')}"
            rows.append(
                [f"#{number}", call.describe(), quantity(_duration(call), "s"), named([slow]), quantity(call.sent, "B"), waited]
            )
        columns = ["call", "what", "took", "on", "sent", "waited most for"]
        return Table(
            "Slowest collectives",
            columns,
            rows,
            ("what", "on", "waited most for"),
            "From their turn to their end, on the slowest rank.",
        )

    def _failures(self) -> Table:
        rows = [
            [
                str(rank),
                f"#{call.call}",
                call.describe(),
                call.error or "",
                call.message or "",
                named(call.due) if call.due else "-",
            ]
            for rank, recording in self._ranks.items()
            for call in recording.calls.values()
            if call.state == FAILED
        ]
        columns = ["rank", "call", "what", "error", "message", "frames were due from"]
        return Table(
            "Failures", columns, rows, tuple(columns[2:]), bad=set(range(len(rows))), nothing="No recorded call failed."
        )

    def _settings(self) -> Table:
        given: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, recording in self._ranks.items():
            for variable, value in recording.header.settings.items():
                given[variable][value].append(rank)
        rows = []
        for variable, values in sorted(given.items()):
            for value, ranks in values.items():
                rows.append([variable, value, "all" if len(ranks) == len(self._ranks) else named(ranks)])
        note = "Those that the job gave; all others had their defaults. Rank by rank where they differ."
        return Table(
            "Settings",
            ["variable", "value", "ranks"],
            rows,
            ("variable", "value", "ranks"),
            note,
            nothing="All settings had their defaults.",
        )


def _duration(call: CallLine) -> float:
    return 0.0 if call.ended is None or call.started is None else call.ended - call.started
