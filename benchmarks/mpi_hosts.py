"""benchmarks/mpi.py between hosts: Open MPI over TCP between network namespaces with shaped links, beside gloo.

    python benchmarks/mpi_hosts.py                     # 4 hosts of one rank, 1 Gbit/s, 64 MiB; root, about a minute
    python benchmarks/mpi_hosts.py --rate 10e9 --sizes 1M 64M --repeats 9 -J hosts.json

mpirun starts its daemons through an agent that enters the namespace where ssh would go to the machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import netns

_PORT = 29810
_AGENT = """#!/bin/bash
# Called as ssh is: HOST COMMAND...
host=$1
shift
exec ip netns exec "$host" unshare --uts bash -c "hostname $host; $*"
"""


@contextmanager
def named(network: netns.Network) -> Iterator[None]:
    """Lets the hosts know each other by name: `ip netns exec` shows a process /etc/netns/NAME/hosts as /etc/hosts."""
    table = "127.0.0.1 localhost\n" + "".join(f"{network.address(i)} {name}\n" for i, name in enumerate(network.names))
    folders = [Path("/etc/netns") / name for name in network.names]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(table)
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def command(network: netns.Network, agent: Path, arguments: list[str]) -> list[str]:
    """What runs benchmarks/mpi.py with one rank on each host of the network."""
    folder = Path(sys.executable).parent
    mpirun = shutil.which("mpirun", path=f"{folder}:{os.environ['PATH']}")
    if mpirun is None:
        raise SystemExit("mpi_hosts.py: no mpirun: pip install 'squinchcomm[mpi]'")
    flags = "--bind-to none --mca pml ob1 --mca btl tcp,self".split() + ["--mca", "btl_tcp_if_include", netns.INTERFACE]
    hosts = ",".join(f"{name}:1" for name in network.names)
    ours = [sys.executable, str(Path(__file__).with_name("mpi.py")), "--part", "allreduce", *arguments]
    start = [mpirun, "-n", str(len(network.names)), "--host", hosts, "--prtemca", "plm_ssh_agent", str(agent), *flags]
    inside = ["unshare", "--uts", "bash", "-c", f'hostname {network.names[0]}; exec "$@"', "mpirun", *start]
    return network.command(0, [*inside, *ours, "--gloo", f"tcp://{network.address(0)}:{_PORT}"])


def main() -> int:
    """Builds the hosts, runs the benchmark there, takes them away again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="hosts, a rank on each")
    parser.add_argument("--rate", type=float, default=1e9, help="bits per second of every link, both ways")
    options, arguments = parser.parse_known_args()
    reason = netns.available()
    if reason is not None:
        raise SystemExit(f"mpi_hosts.py needs network namespaces: {reason}")
    threads = netns.codec_threads(options.hosts)
    environment = (
        {"SQUINCH_CODEC_THREADS": threads}
        | os.environ
        | {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "GLOO_SOCKET_IFNAME": netns.INTERFACE,
            "OMP_NUM_THREADS": "1",
            "SQUINCH_SECURITY": "none",
        }
    )
    with netns.Network(options.hosts) as network, named(network), tempfile.TemporaryDirectory() as folder:
        network.shape(options.rate)
        agent = Path(folder) / "agent"
        agent.write_text(_AGENT)
        agent.chmod(0o755)
        print(f"# links: namespaces, veth, tbf, {options.rate / 1e9:g} Gbit/s, MTU {netns.MTU}", flush=True)
        limit = 2 * (options.hosts - 1) / options.hosts * 6 / 32 * (64 << 20) * 8 / options.rate
        print(f"# wire limit of 64 MiB in 6 bits: {limit * 1e6:.0f} us; in float32: {limit * 32 / 6 * 1e6:.0f} us", flush=True)
        started = command(network, agent, arguments or ["--sizes", "64M", "--repeats", "5"])
        return subprocess.run(started, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
