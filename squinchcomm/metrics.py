"""Metrics for Prometheus: an HTTP exporter for each rank, and a text file for node_exporter. Both are off unless asked for.

    squinchcomm.metrics.serve(9500)    # or SQUINCH_METRICS_PORT=9500: rank i of a machine serves 9500 + i

They show the sum over all communicators of the process, closed ones included, and live as long as it does. Metrics never end a job:
a port or file that cannot be had is one warning in the log. A forked child serves nothing and counts from zero.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from squinchcomm import roster
from squinchcomm.config import Config
from squinchcomm.errors import ConfigError

log = logging.getLogger("squinchcomm")

WRITE_PERIOD_S = 15.0


class _Outlets:
    """What this process has opened."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.registry: Any = None
        self.server: Any = None
        self.thread: threading.Thread | None = None
        self.asked: tuple[str, int] | None = None  # where it serves, or was told to in vain
        self.writer: _Writer | None = None


_outlets = _Outlets()


def registry() -> Any:
    """A `prometheus_client.CollectorRegistry` with these metrics alone, to be served in another way or combined with others."""
    with _outlets.lock:
        if _outlets.registry is None:
            from prometheus_client import CollectorRegistry

            from squinchcomm.collector import SquinchCollector

            _outlets.registry = CollectorRegistry()
            _outlets.registry.register(SquinchCollector())
        return _outlets.registry


def serve(port: int = 9500, address: str = "127.0.0.1") -> int | None:
    """Serves this process's metrics over HTTP, at any path, until it ends or `stop` is called.

    Args:
        port: Of this rank: nothing is added to it. 0 takes any free one.
        address: Where to listen; "0.0.0.0" for all addresses of the machine. There is no authentication.

    Returns:
        The port, also if metrics are served already; None if it cannot be had, which a warning in the log explains.

    Raises:
        ConfigError: the port lies outside 0 .. 65535.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ConfigError(f"metrics: port {port!r} is none; give 1 to 65535, or 0 for any that is free")
    with _outlets.lock:
        if _outlets.server is not None:
            serving = int(_outlets.server.server_port)
            if (address, port) not in (_outlets.asked, (address, serving)):
                log.warning("metrics are served on port %d already, so not at %s port %d too", serving, address, port)
            return serving
        from prometheus_client import start_http_server

        _outlets.asked = address, port
        try:
            _outlets.server, _outlets.thread = start_http_server(port, address, registry())
        except OSError as error:
            log.warning(
                "metrics are not served: %s port %d cannot be had (%s); choose another SQUINCH_METRICS_PORT or _ADDRESS",
                address,
                port,
                error.strerror or error,
            )
            return None
        serving = int(_outlets.server.server_port)
        log.info("metrics are served on http://%s:%d/metrics", address, serving)
        return serving


def write_textfile(path: str | Path) -> None:
    """Writes metrics once, in the text format, for node_exporter's textfile collector, which reads files that end in ".prom".

    The file takes the place of an earlier one in one step; its folder is made if need be. All its series have the label `rank`:
    node_exporter shows the files of all ranks of a machine as one. Raises OSError.
    """
    from prometheus_client import write_to_textfile

    info = roster.rank_info()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_to_textfile(str(path), _Labelled(registry(), str(info.rank if info else 0)))


def stop() -> None:
    """Ends the exporter and the writing of a file, which gets the last values. `serve` and later communicators may start them again."""
    with _outlets.lock:
        server, thread, writer = _outlets.server, _outlets.thread, _outlets.writer
        _outlets.server = _outlets.thread = _outlets.asked = _outlets.writer = None
    if server is not None:
        server.shutdown()
        server.server_close()
    if thread is not None:
        thread.join()
    if writer is not None:
        writer.end()


def start(config: Config) -> None:
    """Opens what the settings of a new communicator ask for, unless it is open or was refused before."""
    info = roster.rank_info()
    if info is None:
        return
    with _outlets.lock:
        if config.metrics_port is not None and _outlets.asked is None:
            port = config.metrics_port + info.local_rank
            if port <= 65535:
                serve(port, config.metrics_address)
            else:
                _outlets.asked = config.metrics_address, port
                log.warning(
                    "metrics are not served: SQUINCH_METRICS_PORT %d + local rank %d is no port",
                    config.metrics_port,
                    info.local_rank,
                )
        if config.metrics_file is not None and _outlets.writer is None:
            path = config.metrics_file
            _outlets.writer = _Writer(path.with_name(f"{path.stem}.{info.rank}{path.suffix}"))


class _Writer:
    """Writes a text file again and again, in a thread of its own, and once more at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ended = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._loop, name="squinchcomm-metrics", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def end(self) -> None:
        """Writes the last values; idempotent."""
        atexit.unregister(self.end)
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self._write()

    def _loop(self) -> None:
        while True:
            self._write()
            if self._ended.wait(WRITE_PERIOD_S):
                return

    def _write(self) -> None:
        try:
            write_textfile(self._path)
            self._failed = False
        except OSError as error:
            if not self._failed:
                # The error itself may name a temporary file.
                reason = error.strerror or error
                log.warning("metrics cannot be written to %s: %s; trying on every %g s", self._path, reason, WRITE_PERIOD_S)
            self._failed = True


class _Labelled:
    """A registry whose series get the label `rank`; `rank_info` has it already."""

    def __init__(self, source: Any, rank: str) -> None:
        self._source = source
        self._rank = rank

    def collect(self) -> Iterator[Any]:
        """The families of the source."""
        for family in self._source.collect():
            family.samples = [sample._replace(labels={"rank": self._rank, **sample.labels}) for sample in family.samples]
            yield family


def _forget() -> None:
    """In a forked child: the port and the file are the parent's; this copy of its socket would keep the port taken after its end."""
    global _outlets
    server = _outlets.server
    if _outlets.writer is not None:
        atexit.unregister(_outlets.writer.end)
    _outlets = _Outlets()
    if server is not None:
        server.socket.close()


os.register_at_fork(after_in_child=_forget)
