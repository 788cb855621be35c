"""Which call is compressed, and why not."""

from __future__ import annotations

import numpy as np

from squinchcomm.errors import ConfigError
from squinchcomm.kernels import get_codec
from squinchcomm.kernels.codec import Codec
from squinchcomm.kernels.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, dtype_name

_COMPRESSIBLE = (FLOAT32, FLOAT16, BFLOAT16)


def choose_codec(
    requested: str | None, default: str, *, dtype: np.dtype, nbytes: int, reduction: str, min_compress_bytes: int
) -> tuple[Codec, str | None]:
    """The codec of one call, and, if a lossy codec was wanted but is not used, the reason: "small", "dtype", "op".

    The communicator's default codec yields to lossless wherever compression makes no sense. A codec named in the call
    does so for small arrays alone: an element type or reduction that it cannot serve is an error.

    Raises:
        ConfigError: the codec named in the call is unknown or cannot serve the call.
    """
    explicit = requested is not None
    codec = get_codec(requested if requested is not None else default)
    if codec.lossless:
        return codec, None
    reason = None
    if dtype not in _COMPRESSIBLE and not (explicit and dtype == FLOAT64):
        reason = "dtype"
        what = f"{dtype_name(dtype)} arrays"
    elif reduction not in ("", "sum", "avg"):
        reason = "op"
        what = f"the reduction {reduction!r}"
    elif nbytes < min_compress_bytes:
        return get_codec("none"), "small"
    if reason is None:
        return codec, None
    if explicit:
        raise ConfigError(f"codec {codec.name!r} cannot serve {what}; leave codec out or pass codec='none'")
    return get_codec("none"), reason
