"""Where a job's metrics are, as the flags of a command say."""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path

import msgspec

from squinchcomm.cli.flags import listed
from squinchcomm.cli.prometheus_api import Server
from squinchcomm.cli.readings import Exporters, Scraped, Source, Textfiles
from squinchcomm.errors import ConfigError

_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")


class _TargetGroup(msgspec.Struct):
    targets: list[str]


def find_source(
    targets: list[str],
    port: int | None,
    ranks: int | None,
    hosts: list[str],
    file: Path | None,
    prometheus: str | None,
    job: str,
) -> Source:
    """The one source that the flags name.

    Raises:
        ConfigError: they name none or several, or something that is not there.
    """
    given = {
        "HOST:PORT": bool(targets),
        "--port": port is not None,
        "--file": file is not None,
        "--prometheus": bool(prometheus),
    }
    named = [name for name, is_given in given.items() if is_given]
    if len(named) != 1:
        what = f"{' and '.join(named)}: give one of them" if named else "whose job? give --port 9500 --ranks 4"
        raise ConfigError(f"{what}; ranks are found by HOST:PORT..., by --port and --ranks, by --file, or by --prometheus")
    if (ranks is not None or hosts) and port is None:
        raise ConfigError("--ranks and --host belong to --port")
    if port is not None:
        fixed = _consecutive(port, ranks, listed("--host", hosts) if hosts else ["127.0.0.1"])
        return Exporters(lambda: fixed)
    if file is not None:
        return _of_file(file)
    if prometheus:
        return Scraped(Server(prometheus), job)
    checked = [_checked(target) for each in targets for target in each.split(",") if target]
    return Exporters(lambda: checked)


def _consecutive(port: int, ranks: int | None, hosts: list[str]) -> list[str]:
    """Rank i of each host serves its metrics on `port` + i."""
    if ranks is None or ranks < 1:
        raise ConfigError(f"--port {port}: give --ranks, the number of ranks on each host, 1 or more")
    if not 1 <= port <= 65536 - ranks:
        raise ConfigError(f"--port {port} --ranks {ranks}: ports {port} to {port + ranks - 1} are not within 1 to 65535")
    bracketed = [f"[{host}]" if ":" in host and not host.startswith("[") else host for host in hosts]
    return [_checked(f"{host}:{number}") for host in bracketed for number in range(port, port + ranks)]


def _checked(target: str) -> str:
    """`target` without a scheme or path. Raises ConfigError unless it is host:port."""
    place = urllib.parse.urlsplit(target).netloc if "//" in target else target
    host, separator, port = place.rpartition(":")
    if not separator or not _HOST.fullmatch(host) or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{target} is no target; write HOST:PORT, an IPv6 address in brackets: 127.0.0.1:9500, [::1]:9500")
    return place


def _of_file(file: Path) -> Source:
    if file.is_dir() or file.suffix == ".prom":
        return Textfiles(file)
    if file.suffix != ".json":
        raise ConfigError(f"--file {file}: give targets for Prometheus (.json), a .prom file, or a folder of such files")
    return Exporters(lambda: _listed_in(file))


def _listed_in(file: Path) -> list[str]:
    """The targets in a file for Prometheus's file discovery, each once."""
    try:
        groups = msgspec.json.decode(file.read_bytes(), type=list[_TargetGroup])
    except OSError as error:
        raise ConfigError(f"--file {file}: {error.strerror}; deploy/prometheus/write-targets.sh writes such files") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f'--file {file}: not as Prometheus reads it, [{{"targets": ["host:port"]}}]: {error}') from None
    found = list(dict.fromkeys(_checked(target) for group in groups for target in group.targets))
    if not found:
        raise ConfigError(f"--file {file}: lists no targets")
    return found
