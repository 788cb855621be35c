"""Codecs by name and by wire id: ours, and third parties' through the entry-point group `squinchcomm.codecs`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.metadata import entry_points

from squinchcomm.errors import ConfigError, WireFormatError
from squinchcomm.kernels.bf16 import BFloat16
from squinchcomm.kernels.codec import Codec
from squinchcomm.kernels.int8 import Int8
from squinchcomm.kernels.none import Raw
from squinchcomm.kernels.squinch6 import Squinch6, Squinch6SR

ENTRY_POINT_GROUP = "squinchcomm.codecs"
OWN_WIRE_IDS = range(64)
_MOST_BITS = 64  # float64 as it is
_LARGEST_TILE = 1 << 20  # elements; a chunk of 1 MiB of float32 has fewer
_NO_CODEC = "auto"  # a setting of this name leaves the choice of the codec to the communicator

_lock = threading.RLock()
_codecs: dict[str, Codec] = {}
_plugins_loaded = False


def register(codec: Codec) -> None:
    """Makes `codec` known under its name and wire id.

    Raises:
        ConfigError: the name or the wire id is taken, the name is "auto", the wire id is one of ours (0..63), or an attribute
            is missing or none that a codec can have.
    """
    _check(codec)
    if codec.name == _NO_CODEC:
        raise ConfigError(f"no codec can be called {_NO_CODEC!r}: settings use the word for a choice among codecs")
    _add(codec)


def get_codec(name: str) -> Codec:
    """The codec of that name.

    Raises:
        ConfigError: no built-in, registered or installed codec has the name; the message lists those that exist.
    """
    with _lock:
        if name not in _codecs:
            _load_plugins()
        if name not in _codecs:
            raise ConfigError(f"unknown codec {name!r}; known are {', '.join(_codecs)}")
        return _codecs[name]


def codec_names() -> tuple[str, ...]:
    """Names of all codecs, installed third-party ones included."""
    with _lock:
        _load_plugins()
        return tuple(_codecs)


def codec_by_wire_id(wire_id: int) -> Codec:
    """The codec whose frames carry that id; WireFormatError if there is none."""
    with _lock:
        for attempt in ("known", "installed"):
            for codec in _codecs.values():
                if codec.wire_id == wire_id:
                    return codec
            if attempt == "known":
                _load_plugins()
        raise WireFormatError(
            f"no codec has wire id {wire_id}; known are {sorted(codec.wire_id for codec in _codecs.values())}"
        )


def _load_plugins() -> None:
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            register(entry_point.load()())
        except Exception as error:
            raise ConfigError(f"codec plug-in {entry_point.name!r} ({entry_point.value}) cannot be loaded: {error}") from error


def _check(codec: Codec) -> None:
    for attribute, allows, wanted in _DEMANDS:
        try:
            value = getattr(codec, attribute)
        except Exception as error:
            raise ConfigError(f"codec {type(codec).__name__} has no {attribute}: {error!r}") from error
        if not allows(value):
            raise ConfigError(f"codec {type(codec).__name__} has {attribute} {value!r}; give {wanted}")


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number_of_bits(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MOST_BITS


_DEMANDS: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("name", lambda value: isinstance(value, str) and value != "", "a string"),
    ("wire_id", lambda value: _is_whole(value, len(OWN_WIRE_IDS), 255), "a whole number of 64..255, others are ours"),
    ("wire_version", lambda value: _is_whole(value, 0, 255), "a whole number from 0 to 255"),
    ("bits_per_element", _is_number_of_bits, f"an int or float above 0, at most {_MOST_BITS}"),
    ("lossless", lambda value: isinstance(value, bool), "a bool"),
    ("tile_size", lambda value: _is_whole(value, 1, _LARGEST_TILE), f"a whole number from 1 to {_LARGEST_TILE}"),
)


def _add(codec: Codec) -> None:
    with _lock:
        for known in _codecs.values():
            if known.name == codec.name:
                raise ConfigError(f"two codecs are called {codec.name!r}: {type(known).__name__} and {type(codec).__name__}")
            if known.wire_id == codec.wire_id:
                raise ConfigError(f"codecs {known.name!r} and {codec.name!r} share wire id {codec.wire_id}")
        _codecs[codec.name] = codec


for _codec in (Raw(), BFloat16(), Int8(), Squinch6(), Squinch6SR()):
    _add(_codec)
