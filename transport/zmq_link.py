"""Our connection to one peer: the socket that sends to it, its counters, and the watch on its life."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from squinchcomm.errors import PeerLost

from .options import TransportOptions
from .security import Security
from .shared_payloads import SharedPayloads
from .zmq_context import ZmqContext

HANDSHAKE_MS = 3000
_RETRY_S = 0.05
_EVENT = struct.Struct("=HI")
_serial = itertools.count()

_MIN_RTT_AT = 148  # tcpi_min_rtt in Linux's struct tcp_info
_FASTEST_LINK = 25e9 / 8  # bytes/s
_LEAST_SEND_BUFFER, _MOST_SEND_BUFFER = 64 << 10, 1 << 20

_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it refused our key or token",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the handshake failed: it uses other security or is no squinchcomm",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it closed the connection during the handshake",
    zmq.Event.DISCONNECTED: "it closed the connection",
    zmq.Event.CLOSED: "nobody listens there",
    zmq.Event.CLOSE_FAILED: "nobody listens there",
}


class Monitor:
    """The events of one zmq socket, in order, without limit: a full queue would block the I/O thread."""

    def __init__(self, context: ZmqContext, watched: zmq.Socket[bytes], events: int) -> None:
        endpoint = f"inproc://squinchcomm-monitor-{next(_serial)}"
        watched.monitor(endpoint, events)
        self.socket = context.zmq.socket(zmq.PAIR)
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def events(self) -> list[tuple[int, int]]:
        """What happened since the last call: event and its value (a file descriptor or an error number)."""
        found: list[tuple[int, int]] = []
        while int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            event, value = _EVENT.unpack(self.socket.recv_multipart()[0])
            found.append((event, value))
        return found

    def close(self) -> None:
        self.socket.close(0)


@dataclass(frozen=True, slots=True)
class Target:
    """A peer to connect to."""

    rank: int
    endpoint: str
    session: int


class PeerLink:
    """One peer. The counters count frames since the start, ours to it (`sent`, `acked`) and its to us (`received`, `released`).

    Attributes:
        near: On this host, and not to be told apart from others by choice.
        shared: Payloads in each other's memory, or None.
    """

    __slots__ = (
        "acked", "broken", "kernel_socket", "lost", "monitor", "near", "rank", "received", "released", "reported",
        "send_part", "sent", "session", "shared", "socket", "suspect",
    )  # fmt: skip

    def __init__(self, target: Target, socket_: zmq.Socket[bytes], monitor: Monitor, kernel_socket: socket.socket) -> None:
        self.rank = target.rank
        self.session = target.session
        self.socket = socket_
        self.send_part = socket_.send
        self.monitor = monitor
        self.kernel_socket = kernel_socket
        self.sent = self.acked = self.received = self.released = self.reported = 0
        self.near = False
        self.shared: SharedPayloads | None = None
        self.lost: str | None = None
        self.suspect: float | None = None
        self.broken = False

    def watch(self, hung_up: bool) -> None:
        """Reads the monitor; if the connection broke, or the peer's to us did, notes since when in `suspect`."""
        self.broken = self.broken or any(event in _FAILURES for event, _ in self.monitor.events())
        if self.suspect is None and (hung_up or self.broken):
            self.suspect = time.monotonic()

    def close(self, linger_ms: int) -> None:
        self.kernel_socket.close()
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close()
            self.socket.close(linger_ms)

    def why_broken(self, peer_timeout_s: float) -> str:
        """Asks our own handle on the connection, because zmq does not say whether the peer hung up or its heartbeat stopped."""
        try:
            self.kernel_socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            silent = f"no sign of life for {peer_timeout_s:.1f} s"
            # When only the peer's connection to us ended, zmq does not say whether it was reset or its heartbeat stopped.
            return silent if self.broken else f"connection to us reset, or {silent}"
        except OSError:
            pass
        finally:
            self.kernel_socket.close()
        return "connection closed"


class Dialer:
    """Connects to one peer, again and again until it succeeds."""

    def __init__(self, context: ZmqContext, target: Target, security: Security, options: TransportOptions, rank: int) -> None:
        self.target = target
        self.failure = "no answer"
        self.refused = False
        self.retry_at: float | None = None
        self._context = context
        self._security = security
        self._options = options
        self._rank = rank
        self._fd = -1
        self._open()

    def progress(self) -> PeerLink | None:
        """Handles what happened; the link once it stands."""
        for event, value in self.monitor.events():
            if event == zmq.EVENT_CONNECTED:
                self._fd = value
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.socket.get(zmq.EVENTS)  # takes note of the connection now: a first send might not
                try:
                    kernel_socket = socket.socket(fileno=os.dup(self._fd))
                except OSError:  # it has ended already; the next event says so
                    continue
                return PeerLink(self.target, self.socket, self.monitor, kernel_socket)
            elif event in _FAILURES:
                if event != zmq.EVENT_DISCONNECTED or self.failure == "no answer":
                    self.failure = _FAILURES[zmq.Event(event)]
                self.refused = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                self.retry_at = time.monotonic() + _RETRY_S
                break
        return None

    def retry_if_due(self) -> None:
        if self.retry_at is not None and time.monotonic() >= self.retry_at:
            self.close()
            self._open()

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(0)

    def lost(self) -> PeerLost:
        peer = self.target.rank
        return PeerLost(f"cannot reach rank {peer} at {self.target.endpoint}: {self.failure}", rank=self._rank, peer=peer)

    def _open(self) -> None:
        self.retry_at = None
        self.socket = _push_socket(self._context, self._security, self._options)
        self.monitor = Monitor(self._context, self.socket, zmq.EVENT_ALL)
        if "[" in self.target.endpoint:
            self.socket.set(zmq.IPV6, 1)
        self.socket.connect(self.target.endpoint)


def connect_links(
    context: ZmqContext, rank: int, targets: Sequence[Target], security: Security, options: TransportOptions, timeout_s: float
) -> list[PeerLink]:
    """Links to all targets, in their order.

    Raises:
        PeerLost: one refused us, or did not answer in time; no link is left open.
    """
    deadline = time.monotonic() + timeout_s
    dialers: list[Dialer] = []
    links: dict[int, PeerLink] = {}
    try:
        for target in targets:
            dialers.append(Dialer(context, target, security, options, rank))
        while dialers:
            poller = zmq.Poller()
            for dialer in dialers:
                poller.register(dialer.monitor.socket, zmq.POLLIN)
            poller.poll(20 if any(dialer.retry_at is not None for dialer in dialers) else 100)
            for dialer in list(dialers):
                link = dialer.progress()
                if link is not None:
                    links[link.rank] = link
                    dialers.remove(dialer)
                elif dialer.refused or time.monotonic() > deadline:
                    raise dialer.lost()
                else:
                    dialer.retry_if_due()
    except BaseException:
        for each in [*dialers]:
            each.close()
        for link in links.values():
            link.close(0)
        raise
    _share_fairly([link.kernel_socket for link in links.values() if link.kernel_socket.family != socket.AF_UNIX])
    return [links[target.rank] for target in targets]


def _share_fairly(connections: Sequence[socket.socket]) -> None:
    """Gives each of several TCP connections the send buffer that its round trip needs, if that is short.

    The kernel lets buffers grow to megabytes that queue in front of the link. There, the flow with the largest share of the
    queue gets the largest share of the link, and a collective waits for the smallest. Equal, short queues took an all-reduce of
    64 MiB among 4 ranks from 1.18 to 1.10 times the wire's limit at 1 Gbit/s, and from 105 to 60 ms at 10 Gbit/s. Long round
    trips, and a connection that is alone, keep the kernel's tuning.
    """
    if len(connections) < 2:
        return
    for connection in connections:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
        if len(info) == _MIN_RTT_AT + 4:
            (round_trip_us,) = struct.unpack_from("=I", info, _MIN_RTT_AT)
            needed = max(_LEAST_SEND_BUFFER, round(_FASTEST_LINK * round_trip_us / 1e6))
            if needed <= _MOST_SEND_BUFFER:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, needed)


def queue_limit(window: int) -> int:
    """A high-water mark that peers who keep to the window never reach: zmq lags up to half of it behind with its accounts."""
    return 2 * window + 16


def _push_socket(context: ZmqContext, security: Security, options: TransportOptions) -> zmq.Socket[bytes]:
    push = context.zmq.socket(zmq.PUSH)
    interval_ms = round(options.peer_timeout_s * 1000 / 4)
    security.set_client(push)
    push.set(zmq.SNDHWM, 0)  # the window is the limit; zmq's own accounts lag behind and would refuse frames that fit
    push.set(zmq.LINGER, 0)
    push.set(zmq.IMMEDIATE, 1)
    push.set(zmq.RECONNECT_IVL, -1)
    push.set(zmq.CONNECT_TIMEOUT, HANDSHAKE_MS)
    push.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    push.set(zmq.MAXMSGSIZE, 1024)
    # An interval, a ping that is just too late, and its timeout must fit into peer_timeout_s.
    push.set(zmq.HEARTBEAT_IVL, interval_ms)
    push.set(zmq.HEARTBEAT_TIMEOUT, interval_ms * 5 // 2)
    push.set(zmq.HEARTBEAT_TTL, interval_ms * 4)
    return push
