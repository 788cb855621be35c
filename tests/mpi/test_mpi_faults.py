"""Ranks of MPI jobs that die, hang, raise or leave: what the others see, and how the job ends."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mpi import jobs


def fault(
    name: str, how: str, *options: str, ranks: int = 3, run_module: bool = False, **settings: Any
) -> tuple[jobs.Ended, Any]:
    """How the job ended, and its events by name and rank."""
    program = ["-m", "mpi4py", "fault_ranks.py"] if run_module else ["fault_ranks.py"]
    ended = jobs.run(jobs.find(name), ranks, *program, how, json.dumps(settings), options=options, timeout_s=60.0)
    events: dict[str, dict[int, Any]] = {}
    # A launcher may run the lines of several ranks together.
    for text in re.findall(r"\{[^{}]*\}", ended.out):
        event = json.loads(text)
        events.setdefault(event["event"], {})[event.get("rank", 1)] = event
    assert how in events, ended
    return ended, events


@pytest.mark.parametrize(("codec", "apart"), [("none", False), ("squinch6", False), ("none", True)])
def test_with_ulfm_a_killed_rank_is_named_within_a_second_and_the_others_go_on(codec: str, apart: bool) -> None:
    ended, events = fault("openmpi", "kill", "--with-ft", "ulfm", ranks=4, codec=codec, apart=apart, survive=True)
    killed_at = events["kill"][1]["at"]
    assert set(events["failed"]) == set(events["closed"]) == {0, 2, 3}, ended
    for event in events["failed"].values():
        assert (event["error"], event["peer"]) == ("PeerLost", 1), ended
        assert event["at"] - killed_at <= 1.0, ended
    assert [(event["world_size"], event["sum"]) for event in events["shrunk"].values()] == [(3, 3.0)] * 3, ended


@pytest.mark.parametrize("name", jobs.NAMES)
def test_without_ulfm_a_killed_rank_ends_the_job(name: str) -> None:
    ended, _ = fault(name, "kill")
    assert ended.status != 0 and ended.took_s < 30, ended
    assert "signal 9" in ended.out + ended.err, ended
    assert not _ranks_left()


@pytest.mark.parametrize("name", jobs.NAMES)
@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_rank_that_leaves_is_lost_and_the_job_ends(name: str, how: str) -> None:
    ended, events = fault(name, how)
    assert ended.status != 0 and ended.took_s < 30, ended
    assert {event["error"] for event in events["failed"].values()} <= {"PeerLost", "CommunicatorAborted"}, ended
    assert set(events["failed"]) >= {0, 2}, ended
    assert how == "exit" or "on purpose" in ended.err, ended


@pytest.mark.parametrize("name", jobs.NAMES)
def test_a_hung_rank_is_a_timeout_and_the_job_ends_although_it_never_answers(name: str) -> None:
    ended, events = fault(name, "stop", timeout_s=2.0)
    assert {event["error"] for event in events["failed"].values()} == {"CollectiveTimeout"}, ended
    assert set(events["failed"]) == {0, 2}, ended
    stopped_at = events["stop"][1]["at"]
    assert all(event["at"] - stopped_at <= 3.0 for event in events["failed"].values()), ended
    assert ended.status != 0 and "rank 1 does not answer" in ended.err, ended
    assert not _ranks_left()


def _ranks_left() -> list[str]:
    """Processes of the program that have outlived their job by 5 s: what was killed takes a moment to die."""
    program = str(Path(__file__).with_name("fault_ranks.py"))
    until = time.monotonic() + 5.0
    while True:
        listed = subprocess.run(["ps", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True).stdout
        left = [line for line in listed.splitlines() if program in line and line.split()[1][0] != "Z"]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)
