"""What a transport can be told, checked once when it is made."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from squinchcomm.errors import ConfigError

_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kMGT]?)(?:b|bit|bits|bps)(?:/s)?\s*")
_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True)
class JobKey:
    """The CURVE key pair that all ranks of a job share, in Z85 text."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """Options of all transports; each uses those that mean something to it.

    Attributes:
        scheme: What carries frames: "ipc" (one host only), "tcp", or "auto": ipc to peers on this host, tcp to others.
        bind: Address of the network interface to listen on, IPv4 or IPv6, or a name that resolves to one. The address
            that peers are told, so never a wildcard.
        port_range: First and last TCP port to try; None lets the system choose.
        host: Identity of this host; None derives it. Ranks with equal identities talk over ipc.
        shared_memory: Payloads to peers reached over ipc are read in place, unless `link_rate` emulates a link.
        window: Frames a peer may have on the way to us before we release one.
        max_payload_bytes: Largest payload of a frame.
        peer_timeout_s: Silence after which a peer counts as lost, at least 1 s.
        security: "curve", "none", or "auto": none on loopback and ipc, curve beyond.
        key: The job's key pair, when it did not come in a file.
        key_file: File with the job's key pair, mode 0600.
        job_token: Shared secret that keeps other local users and stray jobs out when there is no encryption. May be empty.
        link_rate: Bits per second that this process may send, all its transports together, to emulate a slower link; None: no limit.
        io_threads: Threads that move bytes, for the whole process; the first transport of a process decides.
    """

    scheme: Literal["auto", "ipc", "tcp"] = "auto"
    bind: str = "127.0.0.1"
    port_range: tuple[int, int] | None = None
    host: str | None = None
    shared_memory: bool = True
    window: int = 32
    max_payload_bytes: int = 4 << 20
    peer_timeout_s: float = 5.0
    security: Literal["auto", "curve", "none"] = "auto"
    key: JobKey | None = None
    key_file: str | Path | None = None
    job_token: str = field(default="", repr=False)
    link_rate: float | None = None
    io_threads: int = 1

    def __post_init__(self) -> None:
        _require(self.scheme in ("auto", "ipc", "tcp"), f"scheme is 'auto', 'ipc' or 'tcp', not {self.scheme!r}")
        _require(self.security in ("auto", "curve", "none"), f"security is 'auto', 'curve' or 'none', not {self.security!r}")
        _require(2 <= self.window <= 4096, f"window is 2 to 4096 frames, not {self.window}")
        _require(
            64 << 10 <= self.max_payload_bytes <= 1 << 30,
            f"max_payload_bytes is 64 KiB to 1 GiB, not {self.max_payload_bytes}",
        )
        _require(1.0 <= self.peer_timeout_s <= 3600.0, f"peer_timeout_s is 1 to 3600 seconds, not {self.peer_timeout_s}")
        _require(1 <= self.io_threads <= 64, f"io_threads is 1 to 64, not {self.io_threads}")
        _require(self.link_rate is None or self.link_rate > 0, f"link_rate is above 0 bit/s, not {self.link_rate}")
        _require(self.key is None or self.key_file is None, "give the job key as key or as key_file, not both")
        if self.port_range is not None:
            first, last = self.port_range
            _require(1 <= first <= last <= 65535, f"port_range is two ports, the lower first, not {self.port_range}")


def parse_rate(text: str) -> float:
    """Bits per second of a rate such as "1Gbit", "100Mbit", "25Gb/s" or "40Gbps"; k, M, G, T are powers of 1000.

    Raises:
        ConfigError: not a rate, zero, or in bytes (a capital B).
    """
    match = _RATE.fullmatch(text)
    if match is None:
        hint = "; bytes are not taken, multiply by 8" if "B" in text else ""
        raise ConfigError(f"{text!r} is not a rate: write it as 1Gbit, 100Mbit or 25Gb/s{hint}")
    rate = float(match[1]) * _SCALE[match[2]]
    if rate <= 0:
        raise ConfigError(f"{text!r} is not a rate: it must be above 0")
    return rate


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
