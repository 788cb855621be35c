"""The codec's part of a compressed all-reduce: what each rank computes between the two exchanges of bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch.distributed as dist

from squinchcomm.collectives.coder import mix
from squinchcomm.collectives.plan import Plan
from squinchcomm.kernels.codec import Codec
from squinchcomm.torch.exchange import SlotPool


class EncodedSum:
    """One array, the same size on all ranks, cut into one shard a rank at the codec's tiles.

    `encode`, an exchange of `slots`, `combine`, another exchange and `decode` leave in `values` the sum over the ranks times `scale`:
    added in rank order in float32, a value quantised twice whatever the number of ranks, the same bits everywhere.

    Args:
        values: 1-D, read by `encode` and `combine`, written by `decode`.
        codec: How shards and their sum are encoded.
        group: The ranks.
        pool: Where the slots come from; `release` gives them back.
        scale: Multiplied into the sum before it is encoded.
        seed: Key of the random numbers; another one for each sum.
    """

    def __init__(
        self, values: np.ndarray, codec: Codec, group: dist.ProcessGroup, pool: SlotPool, *, scale: float, seed: int
    ) -> None:
        self.values = values
        self.codec = codec
        self.rank, self.ranks = group.rank(), group.size()
        self.scale = scale
        self.seed = seed
        bounds = Plan.even(values.size, self.ranks, values.itemsize, codec.tile_size).bounds
        self.shards = [slice(start, stop) for start, stop in pairwise(bounds)]
        self.nbytes = [codec.encoded_nbytes(shard.stop - shard.start, values.dtype) for shard in self.shards]
        self.slots = pool.take(group, max(self.nbytes))
        self._pool = pool

    def release(self) -> None:
        """Gives the slots back."""
        self._pool.give(self.slots)

    def encode(self, residual: np.ndarray | None = None) -> None:
        """Encodes each shard for its owner; with `residual` as in `Codec.encode`, this rank's own part of which is left alone."""
        for peer in self.slots.peers:
            shard = self.shards[peer]
            self.codec.encode(
                self.values[shard],
                self.slots.outgoing_to(peer, self.nbytes[peer]),
                residual=None if residual is None else residual[shard],
                seed=self._key(0, peer),
            )

    def combine(self) -> None:
        """Adds what has come for this rank's shard and its own exact part, encodes the sum and puts it into all slots."""
        shard = self.shards[self.rank]
        out = self.slots.own_bytes(self.nbytes[self.rank])
        count, key = shard.stop - shard.start, self._key(1, self.rank)
        self.codec.reduce_encode(self._inputs(), count, out, scale=self.scale, seed=key)
        self.slots.send_own_to_all()

    def combine_with_residual(self, current: np.ndarray, coming: np.ndarray) -> None:
        """As `combine`, with the residual `current` added and what the encoding loses in `coming`.

        The loss is one of the scaled sum; as a residual of this rank's contribution it is divided by the scale.
        """
        shard = self.shards[self.rank]
        inputs = self._inputs()
        inputs.insert(self.rank + 1, current[shard])
        total = np.empty(shard.stop - shard.start, np.float32)
        self.codec.reduce(inputs, total)
        lost = coming[shard]
        lost[:] = 0
        out = self.slots.own_bytes(self.nbytes[self.rank])
        self.codec.encode(total, out, scale=self.scale, residual=lost, seed=self._key(1, self.rank))
        lost /= np.float32(self.scale)
        self.slots.send_own_to_all()

    def decode(self) -> None:
        """Writes all shards of the result."""
        for peer, shard in enumerate(self.shards):
            nbytes = self.nbytes[peer]
            payload = self.slots.own_bytes(nbytes) if peer == self.rank else self.slots.incoming_from(peer, nbytes)
            self.codec.decode(payload, shard.stop - shard.start, self.values[shard])

    def _inputs(self) -> list[np.ndarray]:
        nbytes, own = self.nbytes[self.rank], self.values[self.shards[self.rank]]
        return [own if peer == self.rank else self.slots.incoming_from(peer, nbytes) for peer in range(self.ranks)]

    def _key(self, phase: int, peer: int) -> int:
        """Another one for each encoding of all ranks."""
        return mix(self.seed, (phase * self.ranks + peer) * self.ranks + self.rank)
