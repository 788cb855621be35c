"""How a communicator carries a call out: what is compressed, in which chunks, by which algorithm. The same on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from squinchcomm.collectives.call import Call
from squinchcomm.collectives.coder import CodecCoder, Coder, PlainCoder, mix
from squinchcomm.collectives.exchange import Exchange
from squinchcomm.collectives.hierarchy import Hierarchy, Topology, allreduce_shards, reduce_scatter_shards
from squinchcomm.collectives.plan import MAX_CHUNK_BYTES, Plan
from squinchcomm.collectives.probe import PROBE_PERIOD, Probe
from squinchcomm.config import Config
from squinchcomm.cost import HIERARCHICAL, Layout, choose
from squinchcomm.crossover import Crossover
from squinchcomm.errors import ConfigError
from squinchcomm.kernels import warm_up
from squinchcomm.kernels.codec import Codec
from squinchcomm.kernels.dtypes import BFLOAT16, FLOAT16, dtype_name
from squinchcomm.machine import Machine, codec_cost
from squinchcomm.policy import choose_codec
from squinchcomm.stats import Stats
from squinchcomm.transport.base import Transport

log = logging.getLogger("squinchcomm")

_MOST_ANNOUNCED = 1024  # signatures
# Where nothing was measured. Of the links that compression is for this is a slow one, on which the wrong algorithm costs most.
_USUAL = Machine(link_bits_per_s=1e9)


class Strategy:
    """The choices of one communicator.

    Attributes:
        crossover: Where the codec "auto" starts to compress; None if the configuration's codec is another.
    """

    def __init__(self, config: Config, transport: Transport, stats: Stats) -> None:
        self.crossover: Crossover | None = None
        self._config = config
        self._stats = stats
        self._world_size = transport.world_size
        self._max_payload_bytes = transport.max_payload_bytes
        self._topology = Topology(transport.hosts)
        self._layout = Layout.of(transport.hosts)
        self._announced: set[tuple[Any, ...]] = set()
        self._compressed_calls = 0

    @property
    def movement_bytes(self) -> int:
        """Bytes of a chunk in calls that only move data; 0 leaves it to them."""
        return min(self._config.chunk_bytes, self._max_payload_bytes)

    def codec(self, requested: str | None, data: np.ndarray, reduction: str, op: str) -> Codec:
        """The codec for a call; counts why if it is not compressed, logs the first time that it is.

        Raises:
            ConfigError: the codec is unknown, cannot serve this call, or is "auto" in a group that has not measured.
        """
        codec, reason = choose_codec(
            requested,
            self._config.codec,
            dtype=data.dtype,
            nbytes=data.nbytes,
            reduction=reduction,
            min_compress_bytes=self._config.min_compress_bytes,
            compress=self._config.compress,
            pays=lambda: self._pays(data),
        )
        if reason is not None:
            self._stats.uncompressed[reason] += 1
        elif not codec.lossless:
            warm_up()  # here, where a first compilation does not count against the call's deadline
            seen = (op, codec.name, data.dtype, data.size)
            if seen not in self._announced and len(self._announced) < _MOST_ANNOUNCED:
                self._announced.add(seen)
                log.info("%s of %d %s elements goes out as %s", op, data.size, dtype_name(data.dtype), codec.name)
        return codec

    def coder(self, codec: Codec, dtype: np.dtype, op: str, call: Call) -> Coder:
        """What puts the elements of one call on the wire."""
        if codec.lossless:
            return PlainCoder(dtype, op, self._world_size)
        seed = mix(self._config.seed, call.ticket.sequence)
        probe = None
        if self._compressed_calls % PROBE_PERIOD == 0:
            probe = Probe(codec, self._stats, self._compressed_calls // PROBE_PERIOD)
        self._compressed_calls += 1
        return CodecCoder(codec, dtype, op, self._world_size, seed, probe)

    def reduction(self, call: Call, coder: Coder, data: np.ndarray, parts: Sequence[int] | None = None) -> Exchange | Hierarchy:
        """The algorithm for a reduction of `data`, in the given parts, one a rank, or in whatever parts suit it."""
        if not self._takes_hierarchy(coder, data):
            return self.exchange(call, coder, data, parts)
        cut = data.itemsize, coder.tile, self._chunk_bytes(data), MAX_CHUNK_BYTES  # contributions travel raw inside a host
        if parts is None:
            shards = allreduce_shards(self._topology)
            return Hierarchy(call, coder, Plan.even(data.size, len(shards), *cut), data, self._topology, shards)
        return Hierarchy(call, coder, Plan.uneven(parts, *cut), data, self._topology, reduce_scatter_shards(self._topology))

    def exchange(self, call: Call, coder: Coder, data: np.ndarray, parts: Sequence[int] | None = None) -> Exchange:
        """The pairwise exchange of `data`, in the given parts, one a rank, or in equal ones."""
        cut = data.itemsize, coder.tile, self._chunk_bytes(data)
        plan = Plan.even(data.size, self._world_size, *cut) if parts is None else Plan.uneven(parts, *cut)
        return Exchange(call, coder, plan, data)

    def _pays(self, data: np.ndarray) -> bool:
        if self.crossover is not None:
            return self.crossover.pays(data.nbytes, data.itemsize)
        if self._world_size > 1:
            raise ConfigError(
                "codec 'auto' decides by what the ranks measure when they meet: give it to the whole group, as codec='auto' of init "
                "or SQUINCH_CODEC=auto, and leave codec out of the calls"
            )
        return False

    def _chunk_bytes(self, data: np.ndarray) -> int:
        """Bytes of `data` in a chunk, which always fits a frame; 0 lets the plan choose."""
        if not self._config.chunk_bytes:
            return 0
        return min(max(self._config.chunk_bytes * data.itemsize // 4, 1), self._max_payload_bytes)

    def _takes_hierarchy(self, coder: Coder, data: np.ndarray) -> bool:
        if not self._layout.layered or self._config.algorithm == "flat":
            return False
        # Nothing here may differ between ranks: constants are those that all have agreed on, or those of no machine in particular.
        name = coder.codec.name if isinstance(coder, CodecCoder) else "none"
        known = self.crossover
        cost = known.encoded if known is not None and known.encoded.name == name else codec_cost(name)
        machine = known.machine if known is not None else _USUAL
        half = data.dtype in (FLOAT16, BFLOAT16)
        chosen = choose(
            self._layout,
            data.nbytes,
            cost,
            machine,
            itemsize=data.itemsize,
            half=half,
            setting=self._config.algorithm,
            direct=False,  # those do not come here
        )
        return chosen.algorithm == HIERARCHICAL
