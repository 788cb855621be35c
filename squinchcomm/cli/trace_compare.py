"""Recordings of all ranks of a communicator side by side: who is behind, who differs, since which call."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from squinchcomm.recordings import DONE, FAILED, CallLine, Recording

# Files of a job in good order are not written at the same moment: a rank is behind in a call only if others made it this much earlier.
SLACK_S = 1.0
# A call that every rank has made and that has been running for longer is one that hangs.
STUCK_S = 5.0

V = TypeVar("V")

_REPORTED = re.compile(r"( \[reported by rank \d+\])+$")

_SYNCHRONISING = ("allreduce", "reduce_scatter", "all_gather", "all_to_all", "barrier")


class Clocks:
    """One time axis for ranks of several machines: Unix time by the clock of the machine of the lowest rank.

    Ranks of a machine share its monotonic clock. How much machines differ follows from collectives that all ranks finish at about the
    same moment: the median over the calls that both have finished.

    Attributes:
        offsets_s: Seconds by which each machine's clock is ahead of the first one's; None where no call tells.
    """

    def __init__(self, ranks: dict[int, Recording]) -> None:
        self._base: dict[str, float] = {}
        ends: dict[str, dict[int, float]] = {}
        for _, recording in sorted(ranks.items()):
            header = recording.header
            base = self._base.setdefault(header.machine, header.written_at - header.written)
            of_machine = ends.setdefault(header.machine, {})
            for number, call in recording.calls.items():
                if call.state == DONE and call.op in _SYNCHRONISING and call.ended is not None:
                    of_machine[number] = max(of_machine.get(number, 0.0), call.ended + base)
        reference = next(iter(ends))
        self.offsets_s: dict[str, float | None] = {}
        for machine, of_machine in ends.items():
            shared = of_machine.keys() & ends[reference].keys()
            apart = [of_machine[number] - ends[reference][number] for number in shared]
            self.offsets_s[machine] = 0.0 if machine == reference else median(apart) if apart else None

    def time(self, recording: Recording, monotonic: float) -> float:
        """A moment of a rank's monotonic clock on the common axis, seconds."""
        machine = recording.header.machine
        return monotonic + self._base[machine] - (self.offsets_s[machine] or 0.0)


@dataclass
class Verdict:
    """What the recordings of one communicator say.

    Attributes:
        group: Its name.
        ranks: Recordings by rank.
        missing: Ranks without one.
        first: First call in which ranks part, if they do.
        culprits: Ranks that are behind, differ, or are waited for in vain.
        findings: In words.
        notes: What is worth knowing and no difference.
    """

    group: str
    ranks: dict[int, Recording]
    missing: list[int]
    first: int | None = None
    culprits: list[int] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def differ(self) -> bool:
        """Whether ranks differ, one is behind or missing, or a call failed or hangs."""
        return bool(self.findings)

    def part(self, first: int, culprits: Iterable[int], finding: str) -> None:
        """Notes where ranks part and why."""
        self.first = first if self.first is None else min(first, self.first)
        self.culprits += [rank for rank in culprits if rank not in self.culprits]
        self.findings.append(finding)


def compare(recordings: list[Recording]) -> list[Verdict]:
    """A verdict for each communicator, in the order in which their last files were written."""
    groups: defaultdict[str, dict[int, Recording]] = defaultdict(dict)
    for recording in sorted(recordings, key=lambda each: each.header.written_at):
        groups[recording.header.group][recording.header.rank] = recording
    by_time = sorted(groups.items(), key=lambda item: max(each.header.written_at for each in item[1].values()))
    return [_judge(group, dict(sorted(ranks.items()))) for group, ranks in by_time]


def _judge(group: str, ranks: dict[int, Recording]) -> Verdict:
    size = max(recording.header.world_size for recording in ranks.values())
    verdict = Verdict(group, ranks, [rank for rank in range(size) if rank not in ranks])
    if not _find_other_signature(verdict):
        clocks = Clocks(ranks)
        _find_behind(verdict, clocks)
        _find_open_call(verdict, clocks)
    for rank in verdict.missing:
        if rank not in verdict.culprits:
            verdict.findings.append(f"rank {rank} has left no recording, and no other rank's says where it is")
    failures = {rank: _REPORTED.sub("", each.header.failure) for rank, each in ranks.items() if each.header.failure}
    verdict.findings += [f"{named(who)} failed: {text}" for text, who in _by_value(failures).items()]
    _note_waits(verdict)
    return verdict


def _find_other_signature(verdict: Verdict) -> bool:
    """Looks for the first call that is not the same on all ranks that have made it."""
    everywhere = [recording.calls for recording in verdict.ranks.values()]
    for number in sorted(set().union(*everywhere)):
        kinds = {rank: each.calls[number].signature for rank, each in verdict.ranks.items() if number in each.calls}
        if len(set(kinds.values())) == 1:
            continue
        made = _by_value(kinds)
        most = max(map(len, made.values()))
        usual = [who for who in made.values() if len(who) == most]
        others = [rank for who in made.values() for rank in who if len(usual) > 1 or who is not usual[0]]
        told = "; ".join(f"{named(who)} made {verdict.ranks[who[0]].calls[number].describe()}" for who in made.values())
        blame = f"{named(others)} differ{'s' if len(others) == 1 else ''}" if len(usual) == 1 else "ranks differ"
        verdict.part(number, others, f"{blame} in call #{number}: {told}")
        return True
    return False


def _find_behind(verdict: Verdict, clocks: Clocks) -> None:
    """Looks for ranks that have not made a call that others have."""
    ranks = verdict.ranks
    ahead = max(recording.header.next_call for recording in ranks.values())
    for rank, recording in ranks.items():
        number = recording.header.next_call
        if number == ahead:
            continue
        past = {other: each for other, each in ranks.items() if each.header.next_call > number}
        made = [(each, each.calls[number]) for each in past.values() if number in each.calls]
        known = [clocks.time(each, call.queued) for each, call in made]
        behind_s = clocks.time(recording, recording.header.written) - min(known, default=0.0)
        failed = any(call.state == FAILED for _, call in made)
        if not (recording.header.closed or failed or not known or behind_s > SLACK_S):
            when = f"{abs(behind_s):.1f} s {'after' if behind_s > 0 else 'before'} others made it"
            verdict.notes.append(f"rank {rank} was still before call #{number} when its file was written, {when}")
            continue
        what = f", {made[0][1].describe()}," if made else ","
        how = "had closed the communicator" if recording.header.closed and not recording.header.failure else "is behind"
        verdict.part(number, [rank], f"rank {rank} {how}: it has not made call #{number}{what} which {named(past)} made")


def _find_open_call(verdict: Verdict, clocks: Clocks) -> None:
    """Looks at the first call that failed or does not end on ranks that made it, and for whom they wait."""
    found: dict[int, CallLine] = {}
    for rank, recording in verdict.ranks.items():
        unfinished = [call for call in recording.calls.values() if call.state != DONE and call.started is not None]
        if unfinished:
            found[rank] = unfinished[0]
    if not found:
        return
    number = min(call.call for call in found.values())
    stuck = {rank: call for rank, call in found.items() if call.call == number}
    ages = [call.ended or verdict.ranks[rank].header.written for rank, call in stuck.items()]
    longest_s = max(end - (call.started or end) for end, call in zip(ages, stuck.values(), strict=True))
    failed = any(call.state == FAILED for call in stuck.values())
    if not failed and longest_s < STUCK_S:
        verdict.notes.append(f"call #{number} was running")
        return
    blamed = Counter(peer for call in stuck.values() for peer in {*call.due, *([] if call.blames is None else [call.blames])})
    most = [peer for peer, votes in blamed.items() if votes == max(blamed.values())]
    waited = f"; most of them were waiting for {named(most)}" if most else ""
    ended = "failed" if failed else "has not ended"
    verdict.part(
        number,
        most if not verdict.culprits else [],
        f"call #{number}, {next(iter(stuck.values())).describe()}, {ended} on {named(stuck)} after {longest_s:.1f} s{waited}",
    )
    made = {rank: clocks.time(verdict.ranks[rank], call.queued) for rank, call in stuck.items()}
    latest = max(made, key=lambda rank: made[rank])
    if made[latest] - min(made.values()) > SLACK_S:
        verdict.notes.append(f"rank {latest} made call #{number} {made[latest] - min(made.values()):.1f} s after the first")
    for peer in most:
        if peer in verdict.missing:
            verdict.findings.append(f"rank {peer} has left no recording: it died, hangs, or could not write one")


def _note_waits(verdict: Verdict) -> None:
    waits: Counter[int] = Counter()
    for recording in verdict.ranks.values():
        for call in recording.calls.values():
            waits.update(call.waits)
    if waits:
        peer, seconds = waits.most_common(1)[0]
        verdict.notes.append(f"others waited longest for rank {peer}: {seconds:.3g} s of {waits.total():.3g} s of waiting")


def named(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 3", or "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    shown = ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans)
    return f"rank{'s' if sum(map(len, spans)) > 1 else ''} {shown}"


def _by_value(values: dict[int, V]) -> dict[V, list[int]]:
    found: dict[V, list[int]] = {}
    for key, value in values.items():
        found.setdefault(value, []).append(key)
    return found
