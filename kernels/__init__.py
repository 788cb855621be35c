"""Codecs: arrays of floats to a fixed number of bytes and back."""

from __future__ import annotations

from squinchcomm.kernels.codec import Codec
from squinchcomm.kernels.compile import warm_up
from squinchcomm.kernels.registry import codec_by_wire_id, codec_names, get_codec, register

__all__ = ["Codec", "codec_by_wire_id", "codec_names", "get_codec", "register", "warm_up"]
