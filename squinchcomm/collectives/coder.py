"""How one collective puts elements on the wire: as they are, or through a codec.

Both coders have the same steps, each over one chunk: `outgoing` makes the payload of a contribution, `combine` sums the contributions
of all ranks and makes the payload of the result, `partial` does so for some of the ranks, `combine_into` sums them into an array,
`incoming` writes a payload to an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from squinchcomm.collectives.probe import Probe
from squinchcomm.collectives.reduction import reduce_arrays
from squinchcomm.kernels.codec import Codec

_MASK = (1 << 64) - 1


class PlainCoder:
    """Elements travel as they are; payloads are views of the caller's arrays."""

    borrow = True  # payloads are views of the caller's arrays unless there is room for them elsewhere
    tile = 1

    def __init__(self, dtype: np.dtype, op: str, world_size: int) -> None:
        self.dtype = dtype
        self.op = op
        self.world_size = world_size

    def nbytes(self, count: int) -> int:
        """Payload bytes of `count` elements."""
        return count * self.dtype.itemsize

    def outgoing(self, values: np.ndarray, key: int, room: np.ndarray | None) -> np.ndarray:
        """The payload for `values`, in `room` if there is some."""
        payload = values.view(np.uint8)
        if room is None:
            return payload
        room[:] = payload
        return room

    def combine(self, inputs: Sequence[Any], own: np.ndarray, key: int, room: np.ndarray | None) -> np.ndarray:
        """Sums payloads (`own` among them, as an array) into `own` and returns the payload of the sum, in `room` if there is some."""
        self.combine_into(inputs, own)
        return self.outgoing(own, key, room)

    def partial(self, inputs: Sequence[Any], own: np.ndarray, key: int, room: np.ndarray | None) -> np.ndarray:
        """As `combine`, for contributions of some ranks: "avg" does not divide yet, and `own` is left alone."""
        total = np.empty_like(own) if room is None else room.view(self.dtype)
        reduce_arrays([piece.view(self.dtype) for piece in inputs], total, "sum" if self.op == "avg" else self.op, 1)
        return total.view(np.uint8)

    def combine_into(self, inputs: Sequence[Any], out: np.ndarray) -> None:
        """Sums payloads and arrays in their order into `out`."""
        reduce_arrays([piece.view(self.dtype) for piece in inputs], out, self.op, self.world_size)

    def incoming(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Writes a payload's elements to `out`."""
        out.view(np.uint8)[:] = payload

    def settle(self, payload: np.ndarray, own: np.ndarray) -> None:
        """Makes `own` equal to what the peers take from `payload`: it is already."""


class CodecCoder:
    """Elements travel encoded, in buffers made for each chunk and given to the transport."""

    borrow = False

    def __init__(self, codec: Codec, dtype: np.dtype, op: str, world_size: int, seed: int, probe: Probe | None = None) -> None:
        self.codec = codec
        self._probe = probe
        self.tile = codec.tile_size
        self.dtype = dtype
        self.scale = 1.0 / world_size if op == "avg" else 1.0
        self.seed = seed

    def nbytes(self, count: int) -> int:
        """Payload bytes of `count` elements."""
        return self.codec.encoded_nbytes(count, self.dtype)

    def outgoing(self, values: np.ndarray, key: int, room: np.ndarray | None) -> np.ndarray:
        """The payload for `values`, in `room` if there is some.

        `key` numbers the encodings of one collective; with the seed it fixes the random numbers.
        """
        payload = self.codec.encode(values, room, seed=mix(self.seed, key))
        probe = self._probe
        if probe is not None:
            self._probe = None
            probe.look(values, payload)
        return payload

    def combine(self, inputs: Sequence[Any], own: np.ndarray, key: int, room: np.ndarray | None) -> np.ndarray:
        """Sums encoded payloads and the exact `own` array and returns the payload of the sum; `own` is left alone."""
        return self.codec.reduce_encode(inputs, own.size, room, scale=self.scale, seed=mix(self.seed, key))

    def partial(self, inputs: Sequence[Any], own: np.ndarray, key: int, room: np.ndarray | None) -> np.ndarray:
        """As `combine`, for contributions of some ranks: "avg" does not divide yet."""
        return self.codec.reduce_encode(inputs, own.size, room, seed=mix(self.seed, key))

    def combine_into(self, inputs: Sequence[Any], out: np.ndarray) -> None:
        """Sums payloads and arrays in their order into `out`."""
        self.codec.reduce(inputs, out, scale=self.scale)

    def incoming(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Decodes a payload into `out`."""
        self.codec.decode(payload, out.size, out)

    def settle(self, payload: np.ndarray, own: np.ndarray) -> None:
        """Makes `own` equal to what the peers take from `payload`."""
        self.incoming(payload, own)


Coder = PlainCoder | CodecCoder


def mix(seed: int, key: int) -> int:
    """A 64-bit key for the codec's random numbers: SplitMix64 of `seed + key` (Steele, Lea and Flood, 2014)."""
    z = (seed + key * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
