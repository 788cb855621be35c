"""MPI jobs for tests: which MPI is here, and how to run a program of this folder under its mpirun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
LAUNCHER_VARIABLES = re.compile(r"(OMPI_|PMIX?_|PRTE_|MPI_|HYDI?_|SLURM_|RANK$|WORLD_SIZE$|LOCAL_|MASTER_|SQUINCH_)")


@dataclass(frozen=True)
class Mpi:
    """One MPI library with its mpirun."""

    name: str
    mpirun: str
    options: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict, hash=False)

    def command(self, ranks: int, arguments: list[str], *options: str) -> list[str]:
        return [self.mpirun, *self.options, *options, "-n", str(ranks), sys.executable, *arguments]


@dataclass(frozen=True)
class Ended:
    """What a job left."""

    status: int
    out: str
    err: str
    took_s: float

    def __str__(self) -> str:
        return f"status {self.status} after {self.took_s:.1f} s\n{self.out}\n{self.err}"


def _open_mpi() -> Mpi | None:
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None or b"Open MPI" not in _output(mpirun, "--version"):
        return None
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return Mpi("openmpi", mpirun, ("--oversubscribe", "--bind-to", "none"), allow)


def _mpich() -> Mpi | None:
    """MPICH cannot share a bin folder with Open MPI, so `make setup` puts it into a folder of its own in the environment."""
    prefix = Path(os.environ.get("MPICH_PREFIX") or Path(sys.prefix) / "mpich")
    library = prefix / "lib" / "libmpi.so.12"
    if not library.exists() or b"HYDRA" not in _output(str(prefix / "bin" / "mpirun"), "--version"):
        return None
    return Mpi("mpich", str(prefix / "bin" / "mpirun"), (), {"MPI4PY_LIBMPI": str(library)})


def _output(*command: str) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).stdout
    except OSError:
        return b""


_FINDERS = {"openmpi": _open_mpi, "mpich": _mpich}
NAMES = list(_FINDERS)


def find(name: str) -> Mpi:
    """The MPI of this name; skips the test if it is not here."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install mpi4py")
    mpi = _FINDERS[name]()
    if mpi is None:
        pytest.skip(f"no mpirun of {name} is installed; `make setup` installs it")
    return mpi


def run(mpi: Mpi, ranks: int, *arguments: str, options: tuple[str, ...] = (), timeout_s: float = 90.0, **environ: str) -> Ended:
    """Runs `python ARGUMENTS` on that many ranks until all have ended; what is left after `timeout_s` is killed and fails the test.

    Args:
        mpi: Which MPI.
        ranks: Number of processes.
        arguments: Of Python; a file of this folder may go by its name alone.
        options: Of mpirun.
        timeout_s: Seconds for the whole job.
        environ: Variables for the ranks.
    """
    paths = [str(FOLDER / each) if (FOLDER / each).exists() else each for each in arguments]
    clean = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    # Unbuffered, a line and its end are two writes, between which a launcher may put another rank's.
    ours = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": ""}
    environment = {**clean, **ours, **mpi.environ, **environ}
    started = time.monotonic()
    # A session of its own: whatever mpirun started can be found and ended.
    process = subprocess.Popen(
        mpi.command(ranks, paths, *options),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
        cwd=ROOT,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpirun ends its ranks
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        pytest.fail(f"the job hangs; so far:\n{out.decode(errors='replace')}\n{err.decode(errors='replace')}")
    took_s = time.monotonic() - started
    return Ended(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"), took_s)
