"""How one rank tells the others where it listens, and what may be said there."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from typing import Annotated, Literal

import msgspec

from squinchcomm.errors import ConfigError

ADDRESS_VERSION = 2
MAX_ADDRESS_BYTES = 1024

_TCP = re.compile(r"tcp://(?:(\d+\.\d+\.\d+\.\d+)|\[([0-9a-fA-F:.]+(?:%[\w.-]+)?)\]):(\d{1,5})")
_IPC = re.compile(r"ipc://@squinchcomm-[0-9a-f]{32}")


class Address(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Where a zmq transport listens. `session` must come with every frame, so that a stray sender of another job is noticed."""

    version: int
    host: Annotated[str, msgspec.Meta(max_length=256)]
    uid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    session: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    security: Literal["curve", "plain"]
    window: Annotated[int, msgspec.Meta(ge=2, le=4096)]
    max_payload_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    tcp: Annotated[str, msgspec.Meta(max_length=128)] | None
    ipc: Annotated[str, msgspec.Meta(max_length=128)] | None
    doorway: Annotated[str, msgspec.Meta(pattern="^squinchcomm-[0-9a-f]{32}$")] | None  # see shared_memory.Doorway

    def endpoint_from(self, other: Address) -> str | None:
        """Where `other` should connect to reach this rank, or None if it cannot."""
        if self.host == other.host:
            return self.ipc if self.ipc is not None and self.uid == other.uid else self.tcp
        return self.tcp if self.tcp is not None and not is_loopback(tcp_host(self.tcp)) else None


def encode_address(address: Address) -> bytes:
    """The bytes that a rendezvous carries."""
    return msgspec.msgpack.encode(address)


def decode_address(blob: bytes, rank: int) -> Address:
    """The address of `rank`; ConfigError if these bytes are not one, or of another version."""
    if len(blob) > MAX_ADDRESS_BYTES:
        raise ConfigError(
            f"the address of rank {rank} has {len(blob)} bytes; at most {MAX_ADDRESS_BYTES} are allowed", peer=rank
        )
    try:
        address = msgspec.msgpack.decode(blob, type=Address)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"the address of rank {rank} cannot be read ({error}); is its squinchcomm the same?", peer=rank
        ) from None
    if address.version != ADDRESS_VERSION:
        raise ConfigError(f"rank {rank} has address version {address.version}, this rank {ADDRESS_VERSION}", peer=rank)
    if (
        address.tcp is not None
        and not _TCP.fullmatch(address.tcp)
        or address.ipc is not None
        and not _IPC.fullmatch(address.ipc)
    ):
        raise ConfigError(f"rank {rank} listens at {address.tcp} and {address.ipc}, which no squinchcomm does", peer=rank)
    return address


def host_identity() -> str:
    """Equal for two processes exactly if they can talk over abstract Unix sockets: name, boot and network namespace agree."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        boot, namespace = "", 0
    return f"{socket.gethostname()}/{boot}/{namespace}"[:256]


def resolve(name: str) -> str:
    """The numeric address of a host name or literal, brackets allowed; raises OSError if there is none."""
    bare = name.removeprefix("[").removesuffix("]")
    return str(socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)[0][4][0])


def tcp_endpoint(host: str, port: int | str) -> str:
    """How zmq writes a numeric host and a port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def tcp_host(endpoint: str) -> str:
    """The numeric host in such an endpoint."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].removeprefix("[").removesuffix("]")


def is_loopback(host: str) -> bool:
    """Whether a numeric address never leaves this machine."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def is_wildcard(host: str) -> bool:
    """Whether a numeric address stands for all interfaces."""
    return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
