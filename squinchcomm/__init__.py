"""Collectives whose gradient traffic is compressed to 6 bits an element.

    import squinchcomm

    with squinchcomm.init() as comm:
        comm.allreduce(gradients, "avg", codec="squinch6")

Names below are loaded when first used: importing this package costs next to nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from squinchcomm import metrics as metrics
    from squinchcomm import recorder as recorder
    from squinchcomm.bootstrap import init as init
    from squinchcomm.communicator import Communicator as Communicator
    from squinchcomm.config import Config as Config
    from squinchcomm.errors import CollectiveTimeout as CollectiveTimeout
    from squinchcomm.errors import CommunicatorAborted as CommunicatorAborted
    from squinchcomm.errors import ConfigError as ConfigError
    from squinchcomm.errors import MismatchError as MismatchError
    from squinchcomm.errors import PeerLost as PeerLost
    from squinchcomm.errors import SquinchError as SquinchError
    from squinchcomm.errors import WireFormatError as WireFormatError
    from squinchcomm.work import Work as Work

__version__ = "0.1.0"

# In a checkout kernels and transport lie beside this package. A program that runs in it finds this one first, installed or not.
_HERE = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_HERE, "kernels")):
    __path__.append(os.path.dirname(_HERE))

_HOMES = {
    "init": "bootstrap",
    "Communicator": "communicator",
    "Config": "config",
    "Work": "work",
    **dict.fromkeys(
        (
            "CollectiveTimeout",
            "CommunicatorAborted",
            "ConfigError",
            "MismatchError",
            "PeerLost",
            "SquinchError",
            "WireFormatError",
        ),
        "errors",
    ),
}
_MODULES = ("metrics", "recorder")
__all__ = sorted((*_HOMES, *_MODULES))  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
