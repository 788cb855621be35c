"""The torch backend over the mpi transport, under mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import jobs

pytest.importorskip("torch")


@pytest.mark.slow
def test_groups_over_mpi(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("mpi_ranks.py"))
    # torch warns of its own deprecations.
    ended = jobs.run(jobs.find("openmpi"), 3, script, str(tmp_path / "store"), PYTHONWARNINGS="default")
    assert ended.status == 0, ended
    assert sorted(line for line in ended.out.splitlines() if "is done" in line) == [f"rank {rank} is done" for rank in range(3)]
