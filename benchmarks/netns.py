"""Several hosts on one machine: a network namespace a rank, joined by a switch, with links of a chosen rate.

Needs root and iproute2. Nothing outside the namespaces made here is touched, and they always go away again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

SUBNET = "10.77.0"
INTERFACE = "eth0"
MTU = 1500
# Traffic that may pass at once: more would let small messages exceed the rate, less and a busy machine cannot reach it.
_MAX_BURST_S, _MIN_BURST_S = 1e-3, 200e-6
_MIN_BURST_BYTES, _GOOD_BURST_BYTES = 16 * 1024, 128 * 1024
_QUEUE_S = 50e-3  # of traffic that may wait in the link before it is dropped
_MIN_QUEUE_BYTES = 1024 * 1024


def available() -> str | None:
    """Why namespaces cannot be made here, or None."""
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "no iproute2"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "this container may not make network namespaces"
    return None


def codec_threads(ranks: int) -> str:
    """SQUINCH_CODEC_THREADS for ranks on this machine: in namespaces each takes itself for alone on a host of all cores."""
    return str(max(1, len(os.sched_getaffinity(0)) // ranks))


class Network:
    """`hosts` namespaces with one interface each, `INTERFACE` with address `address(i)`, on one bridge. A context manager."""

    def __init__(self, hosts: int) -> None:
        self.names = [f"sq{os.getpid()}-{index}" for index in range(hosts)]
        self.switch = f"sq{os.getpid()}-sw"

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"{SUBNET}.{host + 1}"

    def command(self, host: int, command: list[str]) -> list[str]:
        """`command` as it has to be started to run on `host`; the process is the command itself, not a child of `ip`."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def shape(self, bits_per_s: float | None) -> None:
        """Limits every link, both directions, to a rate; None takes the limits away."""
        for index, name in enumerate(self.names):
            _shape(name, INTERFACE, bits_per_s)
            _shape(self.switch, f"port{index}", bits_per_s)

    def close(self) -> None:
        """Removes the namespaces, and with them interfaces and limits. Idempotent."""
        for name in (*self.names, self.switch):
            if os.path.exists(f"/run/netns/{name}"):
                subprocess.run(["ip", "netns", "delete", name], check=False)

    def _build(self) -> None:
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "bridge0", "up")
        for index, name in enumerate(self.names):
            port = f"port{index}"
            _ip("netns", "add", name)
            _ip("-n", self.switch, "link", "add", port, "mtu", str(MTU), "type", "veth", "peer", INTERFACE, "netns", name)
            _ip("-n", self.switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", name, "address", "add", f"{self.address(index)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "mtu", str(MTU), "up")
            _ip("-n", name, "link", "set", "lo", "up")


def _shape(namespace: str, interface: str, bits_per_s: float | None) -> None:
    base = ["tc", "-n", namespace, "qdisc"]
    if bits_per_s is None:
        # There is nothing to delete on a link that was never shaped.
        subprocess.run([*base, "delete", "dev", interface, "root"], capture_output=True, check=False)
        return
    bytes_per_s = bits_per_s / 8
    burst = max(_MIN_BURST_BYTES, min(bytes_per_s * _MAX_BURST_S, max(_GOOD_BURST_BYTES, bytes_per_s * _MIN_BURST_S)))
    queue = max(_MIN_QUEUE_BYTES, int(bytes_per_s * _QUEUE_S))
    limits = ["rate", f"{int(bits_per_s)}bit", "burst", f"{int(burst)}b", "limit", f"{queue}b"]
    _run([*base, "replace", "dev", interface, "root", "tbf", *limits])


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
