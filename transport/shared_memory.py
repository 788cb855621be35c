"""Payloads in memory that all ranks of a host can read: written once by their sender, read in place by their receivers.

The memory is an anonymous file (memfd_create) that has no name anywhere and so cannot outlive its users; it does not count against
/dev/shm. Its owner hands the descriptor to its peers through abstract Unix datagram sockets; they map it read-only. It is sealed: nobody
can shrink it under its readers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from bisect import bisect
from collections.abc import Mapping
from typing import Any

from squinchcomm.errors import ConfigError, PeerLost

log = logging.getLogger("squinchcomm.transport")

_ALIGN = 64
_GROWTH_BYTES = 4 << 20
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python 3.11 has no name for it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0
_LETTER = struct.Struct("<IIQ")  # receiver's session, sender's rank, bytes of memory
_CREDENTIALS = struct.Struct("=iii")  # pid, uid, gid
_RETRY_S = 0.002
_MOST_LETTERS = 1000  # read at once: who sends rubbish faster than it is thrown away must not keep us from the deadline

supported = bool(_SEALS) and hasattr(os, "memfd_create") and hasattr(socket, "SCM_CREDENTIALS")


class Arena:
    """This rank's memory that its peers see.

    Attributes:
        capacity: Bytes it can grow to; nothing of them is used before it is needed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.fd = os.memfd_create("squinchcomm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.close = weakref.finalize(self, os.close, self.fd)  # no new memory after that; what was given stays
        os.ftruncate(self.fd, capacity)
        self._memory = mmap.mmap(self.fd, capacity)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = []  # start and stop, in order, never adjacent
        self._returned: list[tuple[int, int]] = []
        self._grown = 0
        self._warned = False

    def allocate(self, nbytes: int) -> Slot | None:
        """`nbytes` of memory, or None if there are none. Any thread."""
        size = -(-nbytes // _ALIGN) * _ALIGN
        with self._lock:
            while self._returned:
                self._put(*self._returned.pop())
            start = self._take(size)
            if start is None and self._grow(size):
                start = self._take(size)
            if start is None:
                return None
        return Slot(self, self._base + start, nbytes, (start, start + size))

    def offset(self, payload: Any) -> int | None:
        """Where in the memory an array lies, or None if it does not."""
        interface = getattr(payload, "__array_interface__", None)
        if interface is None:
            return None
        start: int = interface["data"][0] - self._base
        return start if 0 <= start < self.capacity else None

    def give_back(self, span: tuple[int, int]) -> None:
        """Takes back what a slot held. Any thread, any moment, a garbage collection included: so no lock."""
        self._returned.append(span)

    def _take(self, size: int) -> int | None:
        # First fit: the memory that is used stays small and warm.
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[i : i + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        return None

    def _put(self, start: int, stop: int) -> None:
        i = bisect(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, stop))

    def _grow(self, size: int) -> bool:
        if self._free and self._free[-1][1] == self._grown:
            size -= self._grown - self._free[-1][0]
        step = min(max(size, _GROWTH_BYTES), self.capacity - self._grown)
        if step < size or not self.close.alive:
            return False
        try:
            os.posix_fallocate(self.fd, self._grown, step)  # asks now: memory that is missing later ends the process
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning("no %d bytes of shared memory (%s): payloads to ranks of this host go through sockets", step, error)
            return False
        self._put(self._grown, self._grown + step)
        self._grown += step
        return True


class Slot:
    """One allocation, free again when nothing refers to it any more. An array over it does."""

    __slots__ = ("__array_interface__", "_arena", "_span")

    def __init__(self, arena: Arena, address: int, nbytes: int, span: tuple[int, int]) -> None:
        self._arena = arena
        self._span = span
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._arena.give_back(self._span)


class Doorway:
    """Where peers on this host hand in the descriptor of their memory; holds ours."""

    def __init__(self, session: int, arena: Arena) -> None:
        self.arena = arena
        self.name = f"squinchcomm-{secrets.token_hex(16)}"
        self._session = session
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + self.name)
        self._socket.setblocking(False)
        self.rejected = 0

    def exchange(self, rank: int, peers: Mapping[int, tuple[str, int]], timeout_s: float) -> dict[int, memoryview]:
        """Gives every peer this rank's memory and takes theirs.

        Args:
            rank: This rank.
            peers: Name of the doorway and session of each peer.
            timeout_s: Seconds for all of it.

        Returns:
            The memory of each peer, read-only.

        Raises:
            PeerLost: a peer did not take part in time.
            ConfigError: this process has no address space for a peer's memory.
        """
        deadline = time.monotonic() + timeout_s
        unsent, found = dict(peers), dict[int, memoryview]()
        while unsent or len(found) < len(peers):
            for peer, (name, session) in list(unsent.items()):
                if self._hand_in(rank, name, session):
                    del unsent[peer]
            while (letter := self._read()) is not None:
                peer, memory = letter
                if peer in peers and peer not in found:
                    found[peer] = memory
                else:
                    self.rejected += 1
            if time.monotonic() > deadline:
                missing = min([*unsent, *(peers.keys() - found.keys())])
                raise PeerLost(f"rank {missing} is on this host but did not share its memory", rank=rank, peer=missing)
            if unsent or len(found) < len(peers):
                time.sleep(_RETRY_S)
        return found

    def close(self) -> None:
        self._socket.close()

    def _hand_in(self, rank: int, name: str, session: int) -> bool:
        letter = _LETTER.pack(session, rank, self.arena.capacity)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", self.arena.fd))
        try:
            self._socket.sendmsg([letter], [rights], 0, "\0" + name)
        except (BlockingIOError, ConnectionError, FileNotFoundError):
            return False  # its queue is full, or it is gone, which the deadline finds
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                return False  # this user has as many descriptors on the way as it may
            raise
        return True

    def _read(self) -> tuple[int, memoryview] | None:
        """The next letter that is in order; None if none waits."""
        space = socket.CMSG_SPACE(16 * 4) + socket.CMSG_SPACE(_CREDENTIALS.size)
        for _ in range(_MOST_LETTERS):
            try:
                letter, ancillary, flags, _ = self._socket.recvmsg(_LETTER.size + 1, space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return None
            fds, uid = _unpack(ancillary)
            try:
                if uid == os.getuid() and len(fds) == 1 and len(letter) == _LETTER.size and not flags & socket.MSG_CTRUNC:
                    session, peer, size = _LETTER.unpack(letter)
                    if session == self._session and _is_sealed(fds[0], size):
                        return peer, _mapped(fds[0], size, peer)
            finally:
                for fd in fds:
                    os.close(fd)
            self.rejected += 1
        return None


def _mapped(fd: int, size: int, peer: int) -> memoryview:
    try:
        return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ)).toreadonly()
    except OSError as error:
        raise ConfigError(
            f"cannot map the {size >> 20} MiB that rank {peer} shares ({error}): raise the limits of address space and open files "
            "(ulimit -v, -n), or set SQUINCH_SHARED_MEMORY=0 on all ranks",
            peer=peer,
        ) from error


def _unpack(ancillary: list[tuple[int, int, bytes]]) -> tuple[list[int], int | None]:
    """File descriptors and the sender's user from a datagram's control messages."""
    fds: list[int] = []
    uid = None
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += struct.unpack(f"={len(data) // 4}i", data[: len(data) // 4 * 4])
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            uid = _CREDENTIALS.unpack(data)[1]
    return fds, uid


def _is_sealed(fd: int, size: int) -> bool:
    """Whether a descriptor is memory of this size that nobody can shrink."""
    try:
        seals: int = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return seals & fcntl.F_SEAL_SHRINK != 0 and 0 < size == os.fstat(fd).st_size
