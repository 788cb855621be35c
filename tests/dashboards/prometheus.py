"""A Prometheus of the test's own: real server, own folder, own port, ended by its process."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRAPE_S = 1

Series = tuple[dict[str, str], list[float]]


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody has at the moment."""
    for first in range(20300, 32000, 16):
        try:
            for port in range(first, first + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return first
    raise OSError(f"no {count} free ports in a row")


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
    """What `condition` returns as soon as that is true."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, f"no {what} within {timeout_s:g} s"
        time.sleep(0.3)
    return found


def configuration(folder: Path, first_port: int, ranks: int) -> Path:
    """The files of deploy/prometheus and dashboards/ as they lie in the sources, but for shorter intervals; targets as users write them."""
    (folder / "dashboards").symlink_to(ROOT / "dashboards")
    deploy = folder / "deploy" / "prometheus"
    (deploy / "targets").mkdir(parents=True)
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    path = deploy / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    write = ROOT / "deploy" / "prometheus" / "write-targets.sh"
    command = ["sh", str(write), str(deploy / "targets" / "job.json"), str(first_port), str(ranks), "127.0.0.1"]
    subprocess.run(command, check=True, timeout=20)
    return path


class Prometheus:
    """The server, from `with` to its end."""

    def __init__(self, config: Path, data: Path, port: int) -> None:
        program = shutil.which("prometheus")
        assert program is not None
        self.address = f"127.0.0.1:{port}"
        self._log = (data.parent / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={data}",
                f"--web.listen-address={self.address}",
                "--log.level=warn",
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Prometheus:
        try:
            wait_for(self._ready, "answer of Prometheus")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        self._log.close()

    def _ready(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text()
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of the HTTP API."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def over(self, expression: str, start: float, end: float) -> list[Series]:
        """Labels and finite values of each series that an expression gave between two times; those without any left out."""
        answer = self.get("query_range", query=expression, start=f"{start}", end=f"{end}", step=f"{SCRAPE_S}s")
        found = []
        for series in answer["result"]:
            values = [float(value) for _, value in series["values"]]
            values = [value for value in values if math.isfinite(value)]
            if values:
                found.append((series["metric"], values))
        return found

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"}
