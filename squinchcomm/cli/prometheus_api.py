"""Queries to a Prometheus server through its HTTP API. Its answers are JSON and are checked before they are used."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from squinchcomm.errors import ConfigError

TIMEOUT_S = 10.0
_MAX_BYTES = 256 << 20

Point = tuple[float, str]


class Series(msgspec.Struct):
    """One series: its labels, and its values with their Unix times."""

    metric: dict[str, str] = {}
    value: Point | None = None
    values: list[Point] = []

    @property
    def points(self) -> list[tuple[float, float]]:
        """Times and values as numbers, of an instant query as well."""
        found = [self.value] if self.value is not None else self.values
        return [(at, float(text)) for at, text in found]


class _Data(msgspec.Struct):
    result: list[Series]


class _Answer(msgspec.Struct):
    status: Literal["success", "error"]
    data: _Data | None = None
    error: str = ""


@dataclass(frozen=True)
class Server:
    """A Prometheus server.

    Attributes:
        url: Where it is, such as "http://127.0.0.1:9090".

    Raises:
        ConfigError: `url` is none, with the flag's name.
    """

    url: str
    _decoder: msgspec.json.Decoder[_Answer] = field(default_factory=lambda: msgspec.json.Decoder(_Answer), repr=False)

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--prometheus {self.url}: give a URL such as http://127.0.0.1:9090")

    def query(self, expression: str) -> list[Series]:
        """The values of `expression` now; with a range selector, all values within the range."""
        return self._ask("query", query=expression)

    def query_range(self, expression: str, start: float, end: float, step_s: float) -> list[Series]:
        """The values of `expression` from `start` to `end`, Unix times, one for each `step_s`."""
        return self._ask("query_range", query=expression, start=f"{start:.3f}", end=f"{end:.3f}", step=f"{step_s:.3f}")

    def _ask(self, kind: str, **parameters: str) -> list[Series]:
        """Raises ConfigError if there is no answer, or one that refuses."""
        request = f"{self.url.rstrip('/')}/api/v1/{kind}"
        body = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(request, body, timeout=TIMEOUT_S) as answer:
                raw = answer.read(_MAX_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                raw = error.read(_MAX_BYTES)  # what is wrong is said in the body
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ConfigError(f"--prometheus {self.url}: no answer ({reason(error)}); does the server run there?") from None
        try:
            found = self._decoder.decode(raw)
        except msgspec.DecodeError:
            raise ConfigError(f"--prometheus {self.url}: answers, but not as a Prometheus server does") from None
        if found.status == "error" or found.data is None:
            raise ConfigError(f"--prometheus {self.url}: refuses {parameters['query']!r}: {found.error}")
        return found.data.result


def reason(error: BaseException) -> str:
    """Why a server could not be asked, in few words."""
    cause = error.reason if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError) else error
    if isinstance(cause, TimeoutError):
        return "timed out"
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return re.sub(r"\s+", " ", text) or type(cause).__name__


def quoted(text: str) -> str:
    """A string in PromQL."""
    return '"' + text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") + '"'
