"""The files of deploy/slurm: jobs of two nodes on a real Slurm, and what they say to wrong calls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy import slurm_cluster
from tests.deploy.slurm_cluster import SlurmCluster

SLURM = Path(__file__).resolve().parents[2] / "deploy" / "slurm"
RANKS = Path(__file__).with_name("job_ranks.py")
BATCH_FILES = sorted(SLURM.glob("*.sbatch"))

MISSING = slurm_cluster.unavailable()
needs_slurm = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=2) as running:
        yield running


def environment(**extra: str) -> dict[str, str]:
    """What the user who submits has: an active Python environment, and the permission that mpirun wants from root."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **root, **extra}


def lines(output: str) -> list[dict[str, str]]:
    """What each rank reported, in rank order."""
    found = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in output.splitlines() if "rank=" in line]
    return sorted(found, key=lambda line: int(line["rank"]))


@needs_slurm
@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize(
    ("file", "options", "program", "variables", "per_node"),
    [
        ("srun.sbatch", ["--ntasks-per-node=2"], "init", {}, 2),
        ("torchrun.sbatch", ["--cpus-per-task=2"], "init", {"NPROC_PER_NODE": "2"}, 2),
        ("torchrun.sbatch", ["--cpus-per-task=1"], "torch", {"SQUINCH_CODEC": "squinch6"}, 1),
        ("mpirun.sbatch", ["--ntasks-per-node=2"], "init", {}, 2),
        ("mpirun.sbatch", ["--ntasks-per-node=1"], "init", {"SQUINCH_TRANSPORT": "mpi"}, 1),
    ],
    ids=["srun", "torchrun", "torchrun-backend", "mpirun", "mpirun-transport"],
)
def test_a_job_of_two_nodes(
    cluster: SlurmCluster, file: str, options: list[str], program: str, variables: dict[str, str], per_node: int
) -> None:
    if file == "mpirun.sbatch":
        pytest.importorskip("mpi4py")
    job = cluster.submit("--time=2", *options, SLURM / file, RANKS, program, env=environment(**variables))
    state, output = cluster.wait(job, timeout_s=90), cluster.output(job)
    assert state == "COMPLETED", output
    world_size = 2 * per_node
    reports = lines(output)
    assert [int(report["rank"]) for report in reports] == list(range(world_size)), output
    assert {report["size"] for report in reports} == {str(world_size)}
    assert {report["ranks"] for report in reports} == {str(sum(range(world_size)))}, "the lossless sum of rank numbers"
    assert all(0.03 < float(report["error"]) < 0.08 for report in reports), "the compressed mean, as exact as 6 bits are"
    assert {(report["host"], report["local"]) for report in reports} == {
        (host, str(local)) for host in ("sq0", "sq1") for local in range(per_node)
    }
    if file != "mpirun.sbatch":
        assert f".squinchcomm-{job}.key 600" in output, "a key of the job's own while it runs"
    assert list(cluster.folder.glob(".*.key")) == [], "no key afterwards"


@needs_slurm
@pytest.mark.slow
@pytest.mark.root
def test_a_failing_rank_ends_the_job(cluster: SlurmCluster) -> None:
    job = cluster.submit("--time=2", "--ntasks-per-node=1", SLURM / "srun.sbatch", RANKS, "fail", env=environment())
    began = time.monotonic()
    assert cluster.wait(job, timeout_s=60) == "FAILED", cluster.output(job)
    assert time.monotonic() - began < 50, "the other rank sleeps for 100 s"
    assert list(cluster.folder.glob(".*.key")) == []


@needs_slurm
@pytest.mark.slow
@pytest.mark.root
def test_a_cancelled_job_leaves_no_key(cluster: SlurmCluster) -> None:
    sleeper = cluster.folder / "sleeper.py"
    sleeper.write_text("import time\nprint('sleeping', flush=True)\ntime.sleep(100)\n")
    job = cluster.submit("--time=2", "--ntasks-per-node=1", SLURM / "srun.sbatch", sleeper, env=environment())
    deadline = time.monotonic() + 40
    while "sleeping" not in cluster.output(job):
        assert time.monotonic() < deadline, cluster.output(job)
        time.sleep(0.2)
    assert list(cluster.folder.glob(".*.key"))
    cluster.run("scancel", str(job))
    assert cluster.wait(job, timeout_s=30) == "CANCELLED"
    assert list(cluster.folder.glob(".*.key")) == []


@pytest.mark.parametrize("file", BATCH_FILES, ids=lambda path: path.name)
def test_a_batch_file_says_what_it_needs(file: Path, tmp_path: Path) -> None:
    def run(*arguments: str, path: str) -> tuple[int, str]:
        command = ["/bin/bash", str(file), *arguments]
        done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=20, check=False)
        return done.returncode, done.stderr

    status, message = run(path=str(tmp_path))
    assert (status, message[:6]) == (2, "usage:"), message
    status, message = run("train.py", path=str(tmp_path))
    assert status == 2 and "activate" in message, message
