"""Faults on purpose: a TCP proxy that delays, throttles, cuts, swallows, slices or corrupts, and counts each time it does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Toxics:
    """What a proxy does to the bytes that pass it. May be changed while it runs.

    Attributes:
        latency_s: Delay of each piece.
        bytes_per_s: Rate of each direction; 0: no limit.
        slice_bytes: Largest piece passed on at once; 0: as it comes.
        corrupt_every: Flips a bit of one byte out of so many; 0: none.
        spare_bytes: So many bytes of each direction pass uncorrupted first, such as a handshake.
        black_hole: Reads and forgets.
    """

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    slice_bytes: int = 0
    corrupt_every: int = 0
    spare_bytes: int = 0
    black_hole: bool = False
    fired: Counter[str] = field(default_factory=Counter)


class Proxy:
    """A TCP proxy on loopback in a thread of its own; a context manager.

    Attributes:
        port: Where it listens.
        toxics: What it does to the bytes; `toxics.fired` counts how often it did.
    """

    def __init__(self, host: str, port: int, toxics: Toxics | None = None) -> None:
        self.toxics = toxics or Toxics()
        self.port = 0
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        assert self._ready.wait(5)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def reset(self) -> int:
        """Cuts all connections with a TCP reset and returns how many sockets that were."""

        async def cut() -> int:
            victims = list(self._writers)
            for writer in victims:
                handle = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):
                    handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            self.toxics.fired["reset"] += len(victims)
            return len(victims)

        return asyncio.run_coroutine_threadsafe(cut(), self._loop).result(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(far_writer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.ensure_future(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while piece := await source.read(self.toxics.slice_bytes or 1 << 16):
                if self.toxics.black_hole:
                    self.toxics.fired["black_hole"] += 1
                    continue
                await self._delay(len(piece))
                sink.write(self._corrupt(piece, passed))
                passed += len(piece)
                await sink.drain()
        self._writers.discard(sink)
        sink.transport.abort() if self.toxics.black_hole else sink.close()

    async def _delay(self, nbytes: int) -> None:
        toxics = self.toxics
        if toxics.slice_bytes:
            toxics.fired["slice"] += 1
        if toxics.latency_s:
            toxics.fired["latency"] += 1
            await asyncio.sleep(toxics.latency_s)
        if toxics.bytes_per_s:
            toxics.fired["bandwidth"] += 1
            await asyncio.sleep(nbytes / toxics.bytes_per_s)

    def _corrupt(self, piece: bytes, passed: int) -> bytes:
        every = self.toxics.corrupt_every
        if not every:
            return piece
        first = max(self.toxics.spare_bytes - passed, -passed % every)
        if first >= len(piece):
            return piece
        changed = bytearray(piece)
        for position in range(first, len(piece), every):
            changed[position] ^= 1 << (position % 8)
            self.toxics.fired["corrupt"] += 1
        return bytes(changed)
