"""The mpi transport under real mpiruns: contract, collectives, threads, what users do besides."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance import collective_checks, transport_checks
from tests.mpi import jobs

# Too many requests to other processes; the second has a deadline for calls within one. Threads run both.
CHATTY = {"check_everybody_talks_to_everybody", "check_one_way_traffic_flows"}
CHECKS = [check.__name__ for check in transport_checks.CHECKS]


def quick_on(name: str) -> list[Any]:
    """Both libraries; the other one only among the slow tests."""
    return [name, *(pytest.param(other, marks=pytest.mark.slow) for other in jobs.NAMES if other != name)]


@pytest.fixture(params=jobs.NAMES)
def mpi(request: pytest.FixtureRequest) -> jobs.Mpi:
    return jobs.find(request.param)


def passed(ended: jobs.Ended) -> list[str]:
    """What a program says it passed; it must have ended well."""
    assert ended.status == 0, ended
    return [line.split(maxsplit=1)[1] for line in ended.out.splitlines() if line.startswith("passed ")]


@pytest.mark.parametrize("mpi", quick_on("mpich"), indirect=True)
def test_transport_contract_between_processes(mpi: jobs.Mpi) -> None:
    checks = [name for name in CHECKS if name not in CHATTY]
    ended = jobs.run(mpi, 4, "-m", "mpi4py", "transport_ranks.py", *checks)
    assert [line.split()[0] for line in passed(ended)] == checks


@pytest.mark.slow
def test_much_traffic_between_processes(mpi: jobs.Mpi) -> None:
    ended = jobs.run(mpi, 4, "-m", "mpi4py", "transport_ranks.py", "check_everybody_talks_to_everybody")
    assert len(passed(ended)) == 1


@pytest.mark.slow
def test_transport_contract_between_threads_of_one_process(mpi: jobs.Mpi) -> None:
    ended = jobs.run(mpi, 1, "-m", "mpi4py", "transport_threads.py")
    assert [line.split()[0] for line in passed(ended)] == CHECKS


@pytest.mark.parametrize("mpi", quick_on("openmpi"), indirect=True)
def test_collectives(mpi: jobs.Mpi) -> None:
    names = passed(jobs.run(mpi, 4, "-m", "mpi4py", "collective_ranks.py"))
    assert sum("on 4 ranks" in name for name in names) == 21 + len(collective_checks.DTYPES)
    assert sum("on 3 ranks" in name for name in names) == 16


def test_what_users_do_besides(mpi: jobs.Mpi) -> None:
    names = passed(jobs.run(mpi, 3, "-m", "mpi4py", "feature_ranks.py", SQUINCH_TRANSPORT="mpi"))
    assert names[-1] == "check_a_missing_rank_is_named" and len(names) == 22, names


def test_mpich_as_between_hosts() -> None:
    """Without its own shared memory. Over UCX it loses posted receives then, so that ranks would not find each other."""
    ended = jobs.run(jobs.find("mpich"), 3, "-m", "mpi4py", "feature_ranks.py", SQUINCH_TRANSPORT="mpi", MPIR_CVAR_NOLOCAL="1")
    assert passed(ended)[-1] == "check_a_missing_rank_is_named"


@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_support_for_threads(mpi: jobs.Mpi, level: str) -> None:
    ended = jobs.run(mpi, 2, "-m", "mpi4py", "thread_ranks.py", level)
    assert ended.status == 0, ended
    lines = ended.out.splitlines()
    if level == "serialized":
        assert lines == ["works"] * 2
    else:
        assert len(lines) == 2 and all("MPI_THREAD_FUNNELED" in line and "thread_level" in line for line in lines), ended


def test_commands(mpi: jobs.Mpi) -> None:
    options = ("-m", "squinchcomm", "bench", "-b", "64K", "-e", "64K", "-n", "2", "-c", "1", "--codec", "none,squinch6")
    for transport in ("mpi", "zmq"):
        ended = jobs.run(mpi, 2, *options, SQUINCH_TRANSPORT=transport)
        assert ended.status == 0 and f"# transport: {transport}" in ended.out, ended
        assert ended.out.rstrip().endswith("OK"), ended


def test_alone_is_not_two() -> None:
    """Ranks that no mpirun started do not pretend to be a group."""
    mpi = jobs.find("openmpi")
    code = "import squinchcomm; squinchcomm.init(transport='mpi')"
    ended = jobs.run(mpi, 1, "-c", code, RANK="0", WORLD_SIZE="2")
    assert ended.status != 0 and "mpirun -n 2" in ended.err, ended
