"""Which call is compressed, and why not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from squinchcomm.errors import ConfigError
from squinchcomm.kernels import get_codec
from squinchcomm.kernels.codec import Codec
from squinchcomm.kernels.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, dtype_name

# The codec "auto" is this one where it pays, and lossless elsewhere.
AUTO, AUTO_CODEC = "auto", "squinch6"

_COMPRESSIBLE = (FLOAT32, FLOAT16, BFLOAT16)
_LINEAR = ("", "sum", "avg", "premul_sum")


def misfit(dtype: np.dtype, reduction: str, *, asked: bool) -> str | None:
    """Why elements cannot be compressed: "dtype" or "op"; None if they can. float64 can only where the call asks for it."""
    if dtype not in _COMPRESSIBLE and not (asked and dtype == FLOAT64):
        return "dtype"
    return None if reduction in _LINEAR else "op"


def choose_codec(
    requested: str | None,
    default: str,
    *,
    dtype: np.dtype,
    nbytes: int,
    reduction: str,
    min_compress_bytes: int,
    compress: str = "auto",
    pays: Callable[[], bool] = lambda: True,
) -> tuple[Codec, str | None]:
    """The codec of one call, and, if a lossy codec was wanted but is not used, the reason.

    Reasons are "off" and "explicit" (what `compress` says), "dtype", "op", "small" and, of the codec "auto", "crossover". The
    communicator's default codec yields to lossless wherever compression makes no sense. A codec named in the call does so where it is
    switched off and for small arrays alone: an element type or reduction that it cannot serve is an error. The codec "auto" yields
    everywhere, also where `pays`, which is asked last, says that encoding takes longer.

    Raises:
        ConfigError: the codec named in the call is unknown or cannot serve the call.
    """
    asked = requested is not None
    name = requested if requested is not None else default
    auto = name == AUTO
    try:
        codec = get_codec(AUTO_CODEC if auto else name)
    except ConfigError as error:
        if asked:
            raise
        raise ConfigError(f"the setting codec (SQUINCH_CODEC): {error}, and {AUTO}") from None
    if codec.lossless:
        return codec, None
    reason = "off" if compress == "off" else "explicit" if compress == "explicit" and not asked else None
    if reason is None:
        reason = misfit(dtype, reduction, asked=asked and not auto)
        if reason is not None and asked and not auto:
            what = f"{dtype_name(dtype)} arrays" if reason == "dtype" else f"the reduction {reduction!r}"
            raise ConfigError(f"codec {codec.name!r} cannot serve {what}; leave codec out or pass codec='none'")
        if reason is None and nbytes < min_compress_bytes:
            reason = "small"
        if reason is None and auto and not pays():
            reason = "crossover"
    return (codec, None) if reason is None else (get_codec("none"), reason)
