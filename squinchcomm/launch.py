"""Who am I: finds this process's rank, its world and where ranks meet in the variables that launchers set."""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from squinchcomm.errors import ConfigError

Environ = Mapping[str, str]


@dataclass(frozen=True)
class LaunchInfo:
    """This process's place in its job.

    Attributes:
        rank: 0 .. world_size - 1.
        world_size: Number of ranks.
        local_rank: Index of this rank among those of its machine; 0 if the launcher does not tell.
        local_world_size: Number of ranks on this machine; 1 if the launcher does not tell.
        address: Where rank 0 meets the others, "tcp://HOST:PORT" or "ipc://@NAME"; None in a world of one without an address, and
            where MPI started ranks on several machines: they meet through MPI.
        job_token: Equal on all ranks of a job. A secret only if it came from SQUINCH_JOB_TOKEN; "" if nothing names the job.
        source: "arguments", "squinchcomm run", "torchrun", "kubeflow", "openmpi", "mpich", "slurm" or "none".
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str | None
    job_token: str = field(repr=False)
    source: str


@dataclass(frozen=True)
class _Found:
    """What one launcher tells, before the rendezvous address is settled."""

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    names: str  # the variables this came from, for errors
    job: str = ""  # names the job the same way on all ranks
    local_job: str = ""  # names it among the ranks of one machine; `job` if empty
    remote_address: str | None = None  # for a job of several machines
    missing: str = "set SQUINCH_ADDRESS=tcp://HOST:PORT to a free port on rank 0's machine"
    by_mpi: bool = False  # ranks can meet through MPI


def detect(
    rank: int | None = None, world_size: int | None = None, address: str | None = None, environ: Environ | None = None
) -> LaunchInfo:
    """Who this process is: the arguments, then squinchcomm run, torchrun, Kubeflow, Open MPI, MPICH, Slurm, else a world of one.

    Args:
        rank: This process's rank; demands `world_size`, and then the environment is asked only for the rest.
        world_size: Number of ranks.
        address: Where rank 0 meets the others; goes before SQUINCH_ADDRESS and what the launcher says.
        environ: Environment variables; os.environ if None.

    Raises:
        ConfigError: settings that are incomplete, not integers or contradict each other, or an address that cannot be found.
    """
    environ = os.environ if environ is None else environ
    if (rank is None) != (world_size is None):
        given, absent = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise ConfigError(f"{given} was given without {absent}; give both or neither")
    address = address or environ.get("SQUINCH_ADDRESS") or None
    if address is not None:
        _check_address(address)
    if rank is not None and world_size is not None:
        source, found = "arguments", _from_arguments(rank, world_size, address, environ)
    else:
        source, found = _from_launcher(environ)
    _check_ranks(found)
    if address is None and found.world_size > 1:
        address = _launcher_address(found)
    return LaunchInfo(
        rank=found.rank,
        world_size=found.world_size,
        local_rank=found.local_rank or 0,
        local_world_size=found.local_world_size or 1,
        address=address,
        job_token=environ.get("SQUINCH_JOB_TOKEN") or found.job,
        source=source,
    )


def _from_launcher(environ: Environ) -> tuple[str, _Found]:
    for name, detector in _DETECTORS.items():
        found = detector(environ)
        if found is not None:
            # The same variables: torchrun's own, which it may inherit from us, are the newer.
            ours = environ.get("SQUINCH_LAUNCHER") == "run" and "TORCHELASTIC_RUN_ID" not in environ
            return "squinchcomm run" if name == "torchrun" and ours else name, found
    return "none", _Found(0, 1, 0, 1, "")


def _launcher_address(found: _Found) -> str | None:
    job = found.local_job or found.job
    if job and found.local_world_size == found.world_size:
        # An abstract socket needs no port, so that two jobs on a machine cannot collide; its name has room for 107 bytes.
        return f"ipc://@squinchcomm-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:16]}"
    if found.by_mpi:
        return None
    if found.remote_address is None:
        raise ConfigError(f"{found.names} say there are {found.world_size} ranks, but not where they meet: {found.missing}")
    _check_address(found.remote_address)
    return found.remote_address


def _check_ranks(found: _Found) -> None:
    pairs = [("rank", found.rank, "world size", found.world_size)]
    if found.local_rank is not None and found.local_world_size is not None:
        pairs.append(("local rank", found.local_rank, "local world size", found.local_world_size))
    for what, rank, whole, size in pairs:
        if size < 1 or not 0 <= rank < size:
            raise ConfigError(f"{found.names}: {what} {rank} does not fit {whole} {size}; ranks count from 0 to {whole} - 1")
    if found.local_world_size is not None and found.local_world_size > found.world_size:
        raise ConfigError(f"{found.names}: local world size {found.local_world_size} exceeds world size {found.world_size}")


def _check_address(address: str) -> None:
    scheme, separator, rest = address.partition("://")
    if separator and scheme == "ipc" and rest.strip("@"):
        return
    host, _, port = rest.rpartition(":")
    if separator and scheme == "tcp" and host and port.isdigit() and 1 <= int(port) <= 65535:
        return
    raise ConfigError(
        f'address {address!r} is not of the form "tcp://HOST:PORT" or "ipc://@NAME" (argument or SQUINCH_ADDRESS)'
    )


def _integer(environ: Environ, name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text} is not an integer; unset it or set it to one") from None


def _pair(environ: Environ, rank_name: str, size_name: str) -> tuple[int, int] | None:
    """Rank and world size, or None if the environment has neither."""
    rank, size = _integer(environ, rank_name), _integer(environ, size_name)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        given, absent = (rank_name, size_name) if size is None else (size_name, rank_name)
        raise ConfigError(f"{given} is set but {absent} is not; set both or neither")
    return rank, size


def _tcp(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"


def _from_arguments(rank: int, world_size: int, address: str | None, environ: Environ) -> _Found:
    local_rank = local_size = None
    # Ranks that meet on a loopback address or an ipc socket share a machine.
    if address is not None and re.match(r"ipc:|tcp://(127\.|localhost:|\[::1\])", address):
        local_rank, local_size = rank, world_size
    elif (environ.get("RANK"), environ.get("WORLD_SIZE")) == (str(rank), str(world_size)):
        local_rank, local_size = _integer(environ, "LOCAL_RANK"), _integer(environ, "LOCAL_WORLD_SIZE")
    missing = 'give address="tcp://HOST:PORT" (or set SQUINCH_ADDRESS) with a free port on rank 0\'s machine'
    return _Found(rank, world_size, local_rank, local_size, "rank and world_size", missing=missing)


def _from_torchrun(environ: Environ) -> _Found | None:
    pair = _pair(environ, "RANK", "WORLD_SIZE")
    if pair is None:
        return None
    host, port = environ.get("MASTER_ADDR"), _integer(environ, "MASTER_PORT")
    run = f"torch-{environ.get('TORCHELASTIC_RUN_ID', '')}-{host}-{port}" if host and port else ""
    return _Found(
        *pair,
        local_rank=_integer(environ, "LOCAL_RANK"),
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE"),
        names="RANK and WORLD_SIZE",
        job=run,
        # Restarted workers must not meet those of the round before. Machines count restarts apart, so not in `job`.
        local_job=f"{run}-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if run else "",
        # torchrun's own store listens on MASTER_PORT.
        remote_address=_tcp(host, port + 1 if port < 65535 else port - 1) if host and port else None,
        missing="set MASTER_ADDR and MASTER_PORT, or SQUINCH_ADDRESS=tcp://HOST:PORT",
    )


def _from_kubeflow(environ: Environ) -> _Found | None:
    """One process a node, started without torchrun in a pod whose PET_* variables were meant for torchrun."""
    if not environ.get("PET_NODE_RANK"):
        return None
    if not environ.get("PET_NNODES"):
        raise ConfigError("PET_NODE_RANK is set but PET_NNODES is not; set both or neither")
    per_node = environ.get("PET_NPROC_PER_NODE", "1").strip()
    if per_node != "1" or not environ["PET_NNODES"].strip().isdigit():
        raise ConfigError(
            f"PET_NPROC_PER_NODE={per_node} and PET_NNODES={environ['PET_NNODES']} ask for torchrun, but RANK and WORLD_SIZE "
            "are not set: start the script with `torchrun script.py`, which reads PET_*"
        )
    host, port = environ.get("PET_MASTER_ADDR"), _integer(environ, "PET_MASTER_PORT")
    return _Found(
        rank=_integer(environ, "PET_NODE_RANK") or 0,
        world_size=_integer(environ, "PET_NNODES") or 0,
        local_rank=0,
        local_world_size=1,
        names="PET_NODE_RANK and PET_NNODES",
        job=f"pet-{environ.get('PET_RDZV_ID', '')}-{host}-{port}" if host and port else "",
        remote_address=_tcp(host, port + 1 if port < 65535 else port - 1) if host and port else None,
        missing="set PET_MASTER_ADDR and PET_MASTER_PORT, or SQUINCH_ADDRESS=tcp://HOST:PORT",
    )


def _from_openmpi(environ: Environ) -> _Found | None:
    pair = _pair(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if pair is None:
        return None
    return _Found(
        *pair,
        local_rank=_integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=_integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        names="OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE",
        job=_plain("ompi", environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")),
        by_mpi=True,
    )


def _from_mpich(environ: Environ) -> _Found | None:
    # srun --mpi=pmi2 sets PMI_* too, but Slurm's own variables tell more.
    if "SLURM_PROCID" in environ and "MPI_LOCALRANKID" not in environ:
        return None
    pair = _pair(environ, "PMI_RANK", "PMI_SIZE")
    if pair is None:
        return None
    return _Found(
        *pair,
        local_rank=_integer(environ, "MPI_LOCALRANKID"),
        local_world_size=_integer(environ, "MPI_LOCALNRANKS"),
        names="PMI_RANK and PMI_SIZE",
        job=_plain("pmi", environ.get("PMI_JOBID")),
        # Hydra puts no job id into the environment, but its proxy is the ancestor of all ranks of a machine.
        local_job=_plain("pmi", environ.get("PMI_JOBID") or _ancestor("hydra_pmi_proxy")),
        by_mpi=True,
    )


def _plain(prefix: str, job: str | None) -> str:
    return f"{prefix}-{re.sub(r'[^A-Za-z0-9_.-]', '-', job)}" if job else ""


def _ancestor(comm: str) -> str | None:
    """Process id and start time of the nearest ancestor named `comm`."""
    pid = os.getppid()
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        if name == comm:
            return f"{pid}.{fields[19]}"
        pid = int(fields[1])
    return None


def _from_slurm(environ: Environ) -> _Found | None:
    # A batch script itself has SLURM_PROCID=0 and the job's SLURM_NTASKS: SLURM_STEP_* belong to srun's tasks alone.
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    if not environ.get("SLURM_PROCID"):
        return None  # sbatch and salloc set SLURM_NTASKS also where no task runs
    pair = _pair(environ, "SLURM_PROCID", size_name)
    if pair is None:
        return None
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    nodes_name = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    nodes = expand_hostlist(environ.get(nodes_name, ""))
    name = f"slurm-{job}.{step}" if job else ""
    return _Found(
        *pair,
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_world_size=_slurm_local_size(environ, pair[1], len(nodes)),
        names=f"SLURM_PROCID and {size_name}",
        job=name,
        # Below the ephemeral ports, where nothing else of the job is likely to listen.
        remote_address=_tcp(nodes[0], 20000 + zlib.crc32(name.encode()) % 12000) if nodes and job else None,
        missing="set SLURM_JOB_ID and SLURM_JOB_NODELIST, or SQUINCH_ADDRESS=tcp://HOST:PORT",
    )


def _slurm_local_size(environ: Environ, world_size: int, nodes: int) -> int | None:
    """Tasks on this node, from lists such as "2(x3),1" that SLURM_NODEID indexes."""
    if nodes == 1:
        return world_size
    counts: list[int] = []
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = _integer(environ, "SLURM_NODEID")
    return counts[node] if node is not None and 0 <= node < len(counts) else None


def expand_hostlist(text: str) -> list[str]:
    """Host names in Slurm's compressed form: "node[001-003,7],gpu5" gives node001, node002, node003, node7 and gpu5.

    Raises:
        ConfigError: brackets that do not match, or a range that runs backwards.
    """
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        hosts += _expand_item(item)
    if re.sub(r"\[[^\[\]]*\]", "", text).count("[") + re.sub(r"\[[^\[\]]*\]", "", text).count("]"):
        raise ConfigError(f"host list {text!r}: brackets do not match (SLURM_JOB_NODELIST)")
    return hosts


def _expand_item(item: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", item)
    if not match:
        return [item.strip()]
    head, ranges, tail = match.groups()
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.strip().partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise ConfigError(f"host list {item!r}: {part!r} is neither a number nor a range (SLURM_JOB_NODELIST)")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [head + number + rest for number in numbers for rest in _expand_item(tail)]


_DETECTORS: dict[str, Callable[[Environ], _Found | None]] = {
    "torchrun": _from_torchrun,
    "kubeflow": _from_kubeflow,
    "openmpi": _from_openmpi,
    "mpich": _from_mpich,
    "slurm": _from_slurm,
}
