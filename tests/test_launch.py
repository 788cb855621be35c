"""Launch detection from tables of environments, as launchers really set them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from squinchcomm.errors import ConfigError
from squinchcomm.launch import LaunchInfo, detect, expand_hostlist

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job7",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-4975@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_JOBID": "5"}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_TASKS_PER_NODE": "1,2",
}
KUBEFLOW = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400"}
RUN = {
    **{name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"},
    "LOCAL_WORLD_SIZE": "4",
    "LOCAL_RANK": "3",
    "SQUINCH_ADDRESS": "ipc://@x",
    "SQUINCH_JOB_TOKEN": "secret",
    "SQUINCH_LAUNCHER": "run",
}

CASES = [
    # environment, source, (rank, world, local rank, local world), address
    ({}, "none", (0, 1, 0, 1), None),
    ({"MASTER_ADDR": "node1", "LOCAL_RANK": "0"}, "none", (0, 1, 0, 1), None),
    (TORCHRUN, "torchrun", (3, 4, 1, 2), "tcp://node1:29501"),
    ({**TORCHRUN, "MASTER_PORT": "65535"}, "torchrun", (3, 4, 1, 2), "tcp://node1:65534"),
    ({**TORCHRUN, "MASTER_ADDR": "fd00::1"}, "torchrun", (3, 4, 1, 2), "tcp://[fd00::1]:29501"),
    ({**TORCHRUN, "SQUINCH_ADDRESS": "tcp://a:1"}, "torchrun", (3, 4, 1, 2), "tcp://a:1"),
    (RUN, "squinchcomm run", (3, 4, 3, 4), "ipc://@x"),
    ({**RUN, "TORCHELASTIC_RUN_ID": "job7"}, "torchrun", (3, 4, 3, 4), "ipc://@x"),
    ({"PET_NNODES": "2"}, "none", (0, 1, 0, 1), None),
    ({"RANK": "0", "WORLD_SIZE": "1"}, "torchrun", (0, 1, 0, 1), None),
    ({**TORCHRUN, **OPENMPI, **SLURM}, "torchrun", (3, 4, 1, 2), "tcp://node1:29501"),
    (KUBEFLOW, "kubeflow", (1, 2, 0, 1), "tcp://job-node-0-0.job:29401"),
    ({**KUBEFLOW, **TORCHRUN}, "torchrun", (3, 4, 1, 2), "tcp://node1:29501"),
    ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "openmpi", (1, 2, 0, 1), None),
    ({**MPICH, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}, "mpich", (1, 2, 0, 1), None),
    ({**OPENMPI, **SLURM, "SQUINCH_ADDRESS": "tcp://a:1"}, "openmpi", (1, 2, 1, 2), "tcp://a:1"),
    ({**MPICH, "SQUINCH_ADDRESS": "tcp://[::1]:9"}, "mpich", (1, 2, 1, 2), "tcp://[::1]:9"),
    (SLURM, "slurm", (2, 3, 1, 2), "tcp://node07:"),
    ({**SLURM, "PMI_RANK": "0", "PMI_SIZE": "9"}, "slurm", (2, 3, 1, 2), "tcp://node07:"),
    ({**SLURM, "SLURM_STEP_NODELIST": "n1,n2", "SLURM_STEP_TASKS_PER_NODE": "1(x1),2"}, "slurm", (2, 3, 1, 2), "tcp://n1:"),
    ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, "none", (0, 1, 0, 1), None),
]


@pytest.mark.parametrize(("environ", "source", "ranks", "address"), CASES, ids=lambda value: None)
def test_detect(environ: dict[str, str], source: str, ranks: tuple[int, ...], address: str | None) -> None:
    info = detect(environ=environ)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == ranks
    assert info.source == source
    if address is not None and address.endswith(":"):  # Slurm's port is made from the job's number
        assert info.address is not None
        assert info.address.startswith(address)
        assert 20000 <= int(info.address.removeprefix(address)) < 32000
    else:
        assert info.address == address


LOCAL = [
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}, "TORCHELASTIC_RUN_ID"),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3", "TORCHELASTIC_RESTART_COUNT": "0"}, "TORCHELASTIC_RESTART_COUNT"),
    (OPENMPI, "PMIX_NAMESPACE"),
    (MPICH, "PMI_JOBID"),
    ({**SLURM, "SLURM_JOB_NODELIST": "node7", "SLURM_LOCALID": "2"}, "SLURM_STEP_ID"),
]


@pytest.mark.parametrize(("environ", "job_variable"), LOCAL, ids=lambda value: value if isinstance(value, str) else None)
def test_ranks_of_one_machine_meet_on_a_socket_named_after_the_job(environ: dict[str, str], job_variable: str) -> None:
    first, again = detect(environ=environ), detect(environ=environ)
    other = detect(environ={**environ, job_variable: "another"})
    assert first.address is not None
    assert first.address.startswith(f"ipc://@squinchcomm-{os.getuid()}-")
    assert len(first.address) < 100  # an abstract socket's name has 107 bytes
    assert first == again
    assert first.address != other.address


def test_arguments() -> None:
    assert detect(1, 3, "tcp://h:5", {}) == LaunchInfo(1, 3, 0, 1, "tcp://h:5", "", "arguments")
    assert detect(1, 3, "tcp://127.0.0.1:5", {}).local_world_size == 3
    assert detect(1, 3, "ipc://@n", {}).local_rank == 1
    assert detect(0, 2, environ={"SQUINCH_ADDRESS": "tcp://h:5", "SQUINCH_JOB_TOKEN": "t"}).job_token == "t"
    assert detect(0, 1, environ=TORCHRUN) == LaunchInfo(0, 1, 0, 1, None, "", "arguments")
    assert detect(address="tcp://h:5", environ=TORCHRUN).address == "tcp://h:5"


WRONG: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"rank": 0}, {}, "rank was given without world_size"),
    ({"world_size": 2}, TORCHRUN, "world_size was given without rank"),
    ({"rank": 0, "world_size": 2}, {}, "not where they meet: give address"),
    ({"rank": 2, "world_size": 2, "address": "tcp://h:5"}, {}, "rank 2 does not fit world size 2"),
    ({"rank": -1, "world_size": 2, "address": "tcp://h:5"}, {}, "rank -1"),
    ({"rank": 0, "world_size": 0}, {}, "world size 0"),
    ({"address": "h:5"}, {}, "'h:5' is not of the form"),
    ({"address": "tcp://h"}, {}, "'tcp://h' is not of the form"),
    ({"address": "tcp://h:99999"}, {}, "is not of the form"),
    ({"address": "ipc://@"}, {}, "is not of the form"),
    ({}, {"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
    ({}, {"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
    ({}, {"RANK": "zero", "WORLD_SIZE": "2"}, "RANK=zero is not an integer"),
    ({}, {"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE .* set MASTER_ADDR and MASTER_PORT"),
    ({}, {**TORCHRUN, "RANK": "4"}, "RANK and WORLD_SIZE: rank 4 does not fit world size 4"),
    ({}, {**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 does not fit local world size 2"),
    ({}, {**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "local world size 5 exceeds world size 4"),
    ({}, {**TORCHRUN, "MASTER_PORT": "none"}, "MASTER_PORT=none"),
    ({}, {**KUBEFLOW, "PET_NPROC_PER_NODE": "4"}, "start the script with `torchrun"),
    ({}, {"PET_NODE_RANK": "1"}, "PET_NODE_RANK is set but PET_NNODES is not"),
    ({}, {**KUBEFLOW, "PET_NNODES": "1:4"}, "start the script with `torchrun"),
    ({}, {"PMI_RANK": "0"}, "PMI_RANK is set but PMI_SIZE is not"),
    ({}, {"SLURM_PROCID": "0"}, "SLURM_PROCID is set but SLURM_NTASKS is not"),
    ({}, {**SLURM, "SLURM_JOB_NODELIST": "node[1"}, "brackets do not match"),
    ({}, {**SLURM, "SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST"),
]


@pytest.mark.parametrize(
    ("arguments", "environ", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else None
)
def test_incomplete_or_contradictory(arguments: dict[str, Any], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect(**arguments, environ=environ)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("node[001-003,7],gpu5", ["node001", "node002", "node003", "node7", "gpu5"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("a[1],b[2-3]", ["a1", "b2", "b3"]),
    ],
)
def test_hostlists(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["n[1", "n1]", "n[2-1]", "n[a-b]", "n[]", "n[1-]x["])
def test_broken_hostlists(text: str) -> None:
    with pytest.raises(ConfigError, match="host list"):
        expand_hostlist(text)


PROGRAM = "from squinchcomm.launch import detect; info = detect(); print(info.rank, info.world_size, info.source, info.address)"


@pytest.mark.parametrize("launcher", ["mpirun", "mpiexec.hydra", "srun"])
def test_real_launchers(launcher: str) -> None:
    """Two ranks on this machine, under launchers that happen to be installed."""
    if shutil.which(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    if launcher == "srun" and subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        pytest.skip("srun has no Slurm to talk to")
    options = {"mpirun": ["--oversubscribe"]}.get(launcher, [])
    if (
        launcher == "mpirun"
        and b"Open MPI" not in subprocess.run(["mpirun", "--version"], capture_output=True, check=False).stdout
    ):
        options = []
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [launcher, *options, "-n", "2", sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split()[:2] for line in lines] == [["0", "2"], ["1", "2"]]
    assert len({line.split()[3] for line in lines}) == 1
