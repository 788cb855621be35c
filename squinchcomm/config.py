"""Settings: one table of what exists, where each value comes from and what it may be."""

from __future__ import annotations

import dataclasses
import difflib
import fcntl
import ipaddress
import logging
import os
import re
import socket
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from squinchcomm.errors import ConfigError

Source = Literal["argument", "environment", "default"]

# Read by launch.py, or set by `squinchcomm run`; not settings, but names that users may see.
LAUNCH_VARIABLES = {
    "SQUINCH_ADDRESS": 'where rank 0 meets the others: "tcp://HOST:PORT", or "ipc://@NAME" if all ranks share a machine',
    "SQUINCH_JOB_TOKEN": "secret or name shared by the ranks of a job; ranks with another one are turned away",
    "SQUINCH_LAUNCHER": '"run" in the ranks of `squinchcomm run`, which sets it so that messages can name it',
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_NAME = re.compile(r"[a-z][a-z0-9_.-]*")
_SIOCGIFADDR = 0x8915

logger = logging.getLogger("squinchcomm")


def parse_size(value: object) -> int:
    """Bytes in `value`: a whole number, or text such as "64K", "1.5M", "2GiB" (K, M and G are powers of 1024).

    Raises:
        ValueError: it is none of these, or negative.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if not match:
        raise ValueError("not a size")
    size = float(match[1]) * 1024 ** " KMG".index(match[2].upper() or " ")
    if not size.is_integer():
        raise ValueError("not a whole number of bytes")
    return int(size)


def _seconds(least: float, *, inclusive: bool = True, most: float = 1e9) -> Callable[[object], float]:
    def parse(value: object) -> float:
        seconds = float(value)  # type: ignore[arg-type]
        if not least <= seconds <= most or (seconds == least and not inclusive):
            raise ValueError("out of range")
        return seconds

    return parse


def _integer(least: int, most: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError("not an integer")
        number = int(value)
        if not least <= number <= most:
            raise ValueError("out of range")
        return number

    return parse


def _choice(*allowed: str, upper: bool = False) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = str(value).upper() if upper else str(value).lower()
        if text not in allowed:
            raise ValueError("unknown choice")
        return text

    return parse


def _switch(value: object) -> bool:
    text = str(value).lower()
    if text not in ("0", "1", "true", "false"):
        raise ValueError("not a switch")
    return text in ("1", "true")


def _pattern(pattern: re.Pattern[str]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError("not of this form")
        return value

    return parse


def _rate(value: object) -> str:
    from squinchcomm.transport.options import parse_rate

    parse_rate(str(value))
    return str(value)


def _known_interface(value: object) -> str:
    resolve_interface(str(value))
    return str(value)


def expand_path(value: object) -> Path:
    """A path with "~" and "~NAME" replaced by the home folders they stand for.

    Raises:
        ConfigError: there is no such user.
    """
    try:
        return Path(value).expanduser()  # type: ignore[arg-type]
    except RuntimeError:
        raise ConfigError(f"the home folder in {value!s} is not known: no such user; write the path out") from None


def _address(value: object) -> str:
    return str(ipaddress.ip_address(str(value)))


def _textfile(value: object) -> Path:
    path = expand_path(value)
    if path.suffix != ".prom":
        raise ValueError("node_exporter reads *.prom alone")
    return path


def _port_range(value: object) -> tuple[int, int]:
    first, last = value.split("-") if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
    ports = int(first), int(last)
    if not 1 <= ports[0] <= ports[1] <= 65535:
        raise ValueError("out of range")
    return ports


@dataclass(frozen=True)
class Setting:
    """What is known about one field of `Config` besides its type and default."""

    env: str  # name of its environment variable
    parse: Callable[[object], Any]  # from text or a Python value; raises ValueError or TypeError
    allowed: str  # in words, for errors and docs
    doc: str  # one line, with the unit


def _setting(env: str, default: Any, parse: Callable[[object], Any], allowed: str, doc: str) -> Any:
    return field(default=default, metadata={"setting": Setting(env, parse, allowed, doc)})


@dataclass(frozen=True)
class Config:
    """Settings of a communicator; each field's environment variable, allowed values and meaning are in its metadata.

    Values may be given as text ("64K") or as they are stored (65536); None means not given.

    Raises:
        ConfigError: a value that is not allowed, naming its variable or argument.
    """

    transport: str = _setting(
        "SQUINCH_TRANSPORT",
        "zmq",
        _pattern(_NAME),
        "zmq, mpi, inproc (threads of one process) or another transport's name",
        "how bytes travel between ranks",
    )
    codec: str = _setting(
        "SQUINCH_CODEC",
        "none",
        _pattern(_NAME),
        "none, bf16, int8, squinch6, squinch6-sr, another codec's name, or auto",
        "how gradients are compressed; none not at all, auto by squinch6 where that is quicker",
    )
    compress: str = _setting(
        "SQUINCH_COMPRESS",
        "auto",
        _choice("auto", "explicit", "off"),
        "auto, explicit or off",
        "auto compresses sums and averages with the codec that is set, explicit only where a call asks, off nothing",
    )
    min_compress_bytes: int = _setting(
        "SQUINCH_MIN_COMPRESS_BYTES",
        64 * 1024,
        parse_size,
        "a size such as 65536, 64K or 1M",
        "arrays smaller than this many bytes are never compressed",
    )
    chunk_bytes: int = _setting(
        "SQUINCH_CHUNK_BYTES",
        0,
        parse_size,
        "a size such as 65536, 64K or 1M; 0 chooses",
        "bytes of float32 input that one chunk of the pipeline covers, at most 4 MiB",
    )
    algorithm: str = _setting(
        "SQUINCH_ALGORITHM",
        "auto",
        _choice("auto", "flat", "hierarchical"),
        "auto, flat or hierarchical",
        "reductions where ranks share hosts: among all ranks, or inside hosts first; auto asks the cost model",
    )
    timeout_s: float = _setting(
        "SQUINCH_TIMEOUT", 60.0, _seconds(0, inclusive=False), "seconds above 0", "seconds that a call may take before it fails"
    )
    connect_timeout_s: float = _setting(
        "SQUINCH_CONNECT_TIMEOUT",
        60.0,
        _seconds(0, inclusive=False),
        "seconds above 0",
        "seconds that all ranks have to find each other",
    )
    peer_timeout_s: float = _setting(
        "SQUINCH_PEER_TIMEOUT",
        5.0,
        _seconds(1, most=3600),
        "seconds, 1 to 3600",
        "seconds of silence after which a peer counts as lost",
    )
    security: str = _setting(
        "SQUINCH_SECURITY",
        "auto",
        _choice("auto", "curve", "none"),
        "auto, curve or none",
        "encryption and authentication between ranks; auto asks for it beyond this machine",
    )
    key_file: Path | None = _setting(  # noqa: RUF009  it makes a field, as dataclasses.field does
        "SQUINCH_KEY_FILE", None, expand_path, "a path", "the job's key, as `squinchcomm keygen` writes it"
    )
    interface: str | None = _setting(
        "SQUINCH_INTERFACE",
        None,
        _known_interface,
        "an interface's name or address",
        "where this rank listens; the interface on the route to the meeting address if not set",
    )
    host: str | None = _setting(
        "SQUINCH_HOST",
        None,
        _pattern(re.compile(r"\S+")),
        "text without blanks",
        "identity of this machine; ranks with equal ones share it",
    )
    link_rate: str | None = _setting(
        "SQUINCH_LINK_RATE",
        None,
        _rate,
        "a rate such as 1Gbit or 500Mbit",
        "emulated rate of each rank's link, bits/s",
    )
    scheme: str = _setting(
        "SQUINCH_ZMQ_SCHEME",
        "auto",
        _choice("auto", "tcp", "ipc"),
        "auto, tcp or ipc",
        "sockets of the zmq transport; auto takes ipc inside a machine",
    )
    shared_memory: bool = _setting(
        "SQUINCH_SHARED_MEMORY",
        True,
        _switch,
        "1 or 0",
        "ranks of one machine read each other's payloads in place instead of through sockets",
    )
    port_range: tuple[int, int] | None = _setting(
        "SQUINCH_PORT_RANGE",
        None,
        _port_range,
        "FIRST-LAST such as 20000-20100",
        "TCP ports that ranks listen on; any free one if not given",
    )
    io_threads: int = _setting("SQUINCH_IO_THREADS", 1, _integer(1, 64), "1 to 64", "threads that move bytes, per rank")
    codec_threads: int = _setting(
        "SQUINCH_CODEC_THREADS",
        0,
        _integer(0, 1024),
        "0 to 1024; 0 is this process's cores divided by the ranks on the machine",
        "threads that encode and decode, per rank",
    )
    seed: int = _setting(
        "SQUINCH_SEED", 0, _integer(0, 2**64 - 1), "0 to 2**64 - 1", "key of the random numbers of stochastic codecs"
    )
    metrics_port: int | None = _setting(
        "SQUINCH_METRICS_PORT",
        None,
        _integer(1, 65535),
        "1 to 65535",
        "each rank serves metrics to Prometheus on this port plus its local rank; off if not set",
    )
    metrics_address: str = _setting(
        "SQUINCH_METRICS_ADDRESS",
        "127.0.0.1",
        _address,
        "an address of this machine, or 0.0.0.0 for all",
        "where metrics are served; they carry no authentication",
    )
    metrics_file: Path | None = _setting(  # noqa: RUF009  it makes a field, as dataclasses.field does
        "SQUINCH_METRICS_FILE",
        None,
        _textfile,
        'a path that ends in ".prom"',
        "each rank writes metrics every 15 s to this file, its rank put before the suffix, for node_exporter",
    )
    recorder: int = _setting(
        "SQUINCH_RECORDER",
        1000,
        _integer(0, 10**7),
        "0 to 10000000; 0 is off",
        "latest collectives that the flight recorder keeps",
    )
    recorder_dir: Path | None = _setting(  # noqa: RUF009  it makes a field, as dataclasses.field does
        "SQUINCH_RECORDER_DIR",
        None,
        expand_path,
        "a path",
        "folder where the flight recorder writes after a failure, on SIGUSR1 or SIGTERM and at the end",
    )
    recorder_chunks: bool = _setting(
        "SQUINCH_RECORDER_CHUNKS", False, _switch, "1 or 0", "the flight recorder keeps the times of every chunk as well"
    )
    debug: str = _setting(
        "SQUINCH_DEBUG",
        "WARN",
        _choice("WARN", "INFO", "TRACE", upper=True),
        "WARN, INFO or TRACE",
        "how much is logged to stderr",
    )
    sources: Mapping[str, Source] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        sources = dict(self.sources)
        for name, default, setting in settings():
            value = getattr(self, name)
            sources.setdefault(name, "default" if value == default else "argument")
            if value is not default:
                label = f"{setting.env}={value!s}" if sources[name] == "environment" else f"{name}={value!r}"
                object.__setattr__(self, name, _parsed(setting, value, label))
        object.__setattr__(self, "sources", sources)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """Settings by precedence: `overrides` that are not None, then `environ` (os.environ if None), then the default.

        Raises:
            ConfigError: a value that is not allowed or an override that is not a field.
        """
        environ = os.environ if environ is None else environ
        _warn_of_unknown(environ)
        known = [name for name, _, _ in settings()]
        for name in overrides:
            if name not in known:
                raise ConfigError(f"{name}: no such setting{_nearest(name, known)}. Allowed: {', '.join(known)}")
        values: dict[str, Any] = {}
        sources: dict[str, Source] = {}
        for name, _, setting in settings():
            if overrides.get(name) is not None:
                values[name], sources[name] = overrides[name], "argument"
            elif environ.get(setting.env, "").strip():
                values[name], sources[name] = environ[setting.env].strip(), "environment"
            else:
                sources[name] = "default"
        return cls(**values, sources=sources)

    @property
    def bind_address(self) -> str | None:
        """The address of `interface`, or None if that is not set."""
        return None if self.interface is None else resolve_interface(self.interface)

    def resolved_codec_threads(self, local_world_size: int) -> int:
        """Codec threads for each of `local_world_size` ranks on this machine, at least 1."""
        return self.codec_threads or max(1, len(os.sched_getaffinity(0)) // max(1, local_world_size))


def settings() -> Iterator[tuple[str, Any, Setting]]:
    """Name, default and `Setting` of each field of `Config`, in order."""
    for item in dataclasses.fields(Config):
        if "setting" in item.metadata:
            yield item.name, item.default, item.metadata["setting"]


def _parsed(setting: Setting, value: object, label: str) -> Any:
    try:
        return setting.parse(value)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    except (ValueError, TypeError):
        raise ConfigError(f"{label} is not allowed; give {setting.allowed} ({setting.doc})") from None


def _nearest(name: str, known: list[str]) -> str:
    # The common prefix would make every variable look close to every other.
    tails = {item.removeprefix("SQUINCH_"): item for item in known}
    close = difflib.get_close_matches(name.removeprefix("SQUINCH_"), tails, n=1)
    return f"; did you mean {tails[close[0]]}?" if close else ""


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    known = [setting.env for _, _, setting in settings()] + list(LAUNCH_VARIABLES)
    for name in sorted(environ):
        if name.startswith("SQUINCH_") and name not in known:
            hint = _nearest(name, known) or "; `squinchcomm env` lists those that exist"
            warnings.warn(f"{name} is set but is no setting of squinchcomm{hint}", UserWarning, stacklevel=3)


def interface_addresses() -> dict[str, list[str]]:
    """Addresses of each network interface of this machine, IPv4 first; interfaces that have none included."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name, addresses in found.items():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            addresses.append(socket.inet_ntoa(answer[20:24]))
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if name in found and not address.is_link_local:
            found[name].append(str(address))
    return found


def resolve_interface(interface: str) -> str:
    """The address to bind for `interface`, a name such as "eth0" or an address, which is returned as it is.

    Raises:
        ConfigError: no interface has that name, or it has no address; lists those that do.
    """
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        pass
    interfaces = interface_addresses()
    if interfaces.get(interface):
        return interfaces[interface][0]
    what = "has no address" if interface in interfaces else "is neither an interface of this machine nor an address"
    usable = ", ".join(f"{name} ({addresses[0]})" for name, addresses in interfaces.items() if addresses)
    raise ConfigError(f"{interface!r} {what}. Interfaces with one: {usable or 'none'}")


def configure_logging(debug: str, rank: int) -> None:
    """Sets the package logger's level from `Config.debug`; writes to stderr unless the application has set up logging."""
    # TRACE is Python's DEBUG under the name that users of NCCL_DEBUG know.
    logger.setLevel({"WARN": logging.WARNING, "INFO": logging.INFO, "TRACE": logging.DEBUG}[debug])
    for handler in [handler for handler in logger.handlers if getattr(handler, "_squinchcomm", False)]:
        logger.removeHandler(handler)
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"squinchcomm [rank {rank}] %(levelname)s %(message)s"))
    handler._squinchcomm = True  # type: ignore[attr-defined]
    logger.addHandler(handler)
