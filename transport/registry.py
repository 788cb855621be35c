"""Transports by name: those of this package, and those that others bring through the entry-point group `squinchcomm.transports`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

from squinchcomm.errors import ConfigError

from .base import Backend
from .options import TransportOptions

ENTRY_POINT_GROUP = "squinchcomm.transports"

_BUILTIN = {
    "zmq": "squinchcomm.transport.zmq_backend:ZmqBackend",
    "inproc": "squinchcomm.transport.inproc:InprocBackend",
    "mpi": "squinchcomm.transport.mpi_backend:MpiBackend",
}

BackendFactory = Callable[[TransportOptions], Backend]


def backend_names() -> list[str]:
    """All names that `get_backend` takes, sorted. Imports none of them."""
    return sorted({*_BUILTIN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def get_backend(name: str, options: TransportOptions | None = None) -> Backend:
    """The backend called `name`, with these options. Only its module is imported.

    Raises:
        ConfigError: no such transport, or it does not like the options.
        ImportError: a library that it needs is not installed.
    """
    return _factory(name)(options if options is not None else TransportOptions())


def _factory(name: str) -> BackendFactory:
    if name in _BUILTIN:
        module, _, attribute = _BUILTIN[name].partition(":")
        factory: BackendFactory = getattr(import_module(module), attribute)
        return factory
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        loaded: BackendFactory = point.load()
        return loaded
    raise ConfigError(f"there is no transport {name!r}; there are: {', '.join(backend_names())}")
