"""The zmq context of this process and the thread that answers who may connect to its sockets."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref

import zmq

from .security import Security

log = logging.getLogger("squinchcomm.transport")

_lock = threading.RLock()  # the garbage collector may release while its thread is here
_shared: ZmqContext | None = None
_users = 0
_after_fork: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_inherited: list[object] = []  # what a forked child got from its parent and must neither use nor free


# glibc's mallopt parameters. With the defaults each large frame is mapped, faulted in page by page and unmapped again, which
# took a third of the CPU time of a lossless all-reduce of 64 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 256 << 20
_HEAP_BELOW_BYTES = 32 << 20


def _keep_freed_memory() -> None:
    """Lets malloc reuse the memory of frames. Left alone: another allocator, and what MALLOC_* in the environment says."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _HEAP_BELOW_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class ForkAware:
    """Something that becomes unusable in a forked child."""

    def disown(self) -> None:
        raise NotImplementedError


def watch_fork(thing: ForkAware) -> None:
    """Calls `thing.disown` in every child forked from now on, as long as it lives."""
    _after_fork.add(thing)


class ZmqContext:
    """A zmq context with its ZAP handler.

    The handler's thread ends by itself when the context is terminated.
    """

    def __init__(self, io_threads: int = 1) -> None:
        self.zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
        self.zmq.set(zmq.MAX_SOCKETS, 65000)
        self._policies: dict[str, Security] = {}
        replies = self.zmq.socket(zmq.REP)
        replies.set(zmq.LINGER, 0)
        replies.bind("inproc://zeromq.zap.01")
        arguments = (replies, self._policies)
        self.zap_thread = threading.Thread(target=_answer_zap, args=arguments, name="squinchcomm-zap", daemon=True)
        self.zap_thread.start()

    def admit(self, domain: str, security: Security) -> None:
        """Lets connections to `domain` in if `security` admits them."""
        self._policies[domain] = security

    def retract(self, domain: str) -> None:
        """Takes `admit` back."""
        self._policies.pop(domain, None)

    def terminate(self) -> None:
        """Frees everything. All sockets must be closed; waits for their linger."""
        self.zmq.term()
        if self.zap_thread is not threading.current_thread():
            self.zap_thread.join()


def acquire_context(io_threads: int) -> ZmqContext:
    """The context of this process, made for its first user."""
    global _shared, _users
    with _lock:
        _users += 1
        if _shared is None:
            _keep_freed_memory()
            _shared = ZmqContext(io_threads)
        return _shared


def release_context(context: ZmqContext) -> None:
    """Takes back one `acquire_context`; the last one terminates the context."""
    global _shared, _users
    with _lock:
        if context is not _shared:
            return
        _users -= 1
        # The garbage collector may bring us here on the ZAP thread, which cannot wait for its own end.
        if _users > 0 or threading.current_thread() is context.zap_thread:
            return
        _shared = None
    context.terminate()


def _answer_zap(replies: zmq.Socket[bytes], policies: dict[str, Security]) -> None:
    while True:
        try:
            request = replies.recv_multipart()
            replies.send_multipart(_decide(request, policies))
        except zmq.ContextTerminated:
            break
        except Exception:  # without this thread nobody could connect any more
            log.exception("a ZAP request was not answered")
    replies.close(0)


def _decide(request: list[bytes], policies: dict[str, Security]) -> list[bytes]:
    """The answer to one request of RFC 27: version, id, domain, address, identity, mechanism, credentials."""
    version, request_id = (request + [b"", b""])[:2]
    admitted = False
    if version == b"1.0" and len(request) >= 6:
        security = policies.get(request[2].decode("ascii", "replace"))
        admitted = security is not None and security.admits(request[5], request[6:])
    status = (b"200", b"OK") if admitted else (b"400", b"wrong key or token")
    return [b"1.0", request_id, *status, b"rank" if admitted else b"", b""]


def _in_child() -> None:
    global _shared, _users, _lock
    _inherited.append(_shared)
    for thing in list(_after_fork):
        _inherited.append(thing)
        thing.disown()
    _after_fork.clear()
    _shared, _users, _lock = None, 0, threading.RLock()


os.register_at_fork(after_in_child=_in_child)
