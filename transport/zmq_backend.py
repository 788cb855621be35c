"""The zmq transport: where to listen, and how a group is joined."""

from __future__ import annotations

import os
import resource
import secrets
import threading
import time
import weakref
from collections.abc import Sequence

import zmq

from squinchcomm.errors import ConfigError

from . import address as addresses_
from .address import Address, decode_address, encode_address, host_identity
from .base import Backend, Listener, Transport
from .options import TransportOptions
from .security import Security, choose_security
from .shared_memory import Arena, Doorway
from .shared_payloads import SharedPayloads, open_doorway
from .zmq_context import ZmqContext, acquire_context, release_context
from .zmq_link import HANDSHAKE_MS, Monitor, PeerLink, Target, connect_links, queue_limit
from .zmq_transport import ZmqTransport, max_message_bytes

_FILES_PER_PEER = 7
_FILES_TO_LISTEN = 15
_CONNECTIONS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPT_FAILED


class Inbox:
    """The socket that all peers send to, with all that must be freed together with it."""

    def __init__(self, options: TransportOptions, security: Security) -> None:
        self.context: ZmqContext = acquire_context(options.io_threads)
        self._pid = os.getpid()
        self._domain = secrets.token_hex(8)
        self.context.admit(self._domain, security)
        self.socket = self.context.zmq.socket(zmq.PULL)
        self.monitor = Monitor(self.context, self.socket, _CONNECTIONS)
        self._callers: dict[int, int] = {}  # file descriptor of a connection: the rank that said hello on it
        self._accepted: set[int] = set()  # descriptors of the connections that stand
        self._hung_up: list[int] = []
        self.rejected = 0
        security.set_server(self.socket, self._domain)
        self.socket.set(zmq.RCVHWM, queue_limit(options.window))
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.MAXMSGSIZE, max_message_bytes(options))
        self.socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self.socket.set(zmq.BACKLOG, 1024)
        self._waker = self.context.zmq.socket(zmq.PUSH)
        self._waker.set(zmq.LINGER, 0)
        self._waking = threading.Lock()
        self.woken = False  # the alarm has not been read yet
        self.alarm = secrets.token_bytes(8)  # known to this process alone
        place = f"inproc://squinchcomm-wake-{self._domain}"
        self.socket.bind(place)
        self._waker.connect(place)

    def wake(self) -> None:
        """Puts one message `alarm` into the socket, which ends a wait at once. Any thread; nothing happens after `close`."""
        with self._waking:
            if not (self.woken or self._waker.closed) and os.getpid() == self._pid:
                self.woken = True
                self._waker.send(self.alarm, zmq.NOBLOCK)

    def hung_up(self) -> list[int]:
        """Ranks whose connection to us ended since the last call. Connections that ended before their hello go into `rejected`.

        Call it only when the socket has nothing to read, so that every hello has been heard.
        """
        self._read_monitor()
        ranks, self._hung_up = self._hung_up, []
        return ranks

    def greet(self, fd: int, rank: int) -> None:
        """Notes who said hello on a connection. What ended on the same descriptor before it was accepted is not its end."""
        self._read_monitor()
        if fd in self._accepted:
            self._callers[fd] = rank
        else:  # it has ended already
            self._hung_up.append(rank)

    def _read_monitor(self) -> None:
        for event, value in self.monitor.events():
            if event == zmq.EVENT_ACCEPTED:
                self._accepted.add(value)
                continue
            rank = None
            if event == zmq.EVENT_DISCONNECTED:
                self._accepted.discard(value)
                rank = self._callers.pop(value, None)
            if rank is None:
                self.rejected += 1
            else:
                self._hung_up.append(rank)

    def bind_ipc(self) -> str:
        endpoint = f"ipc://@squinchcomm-{secrets.token_hex(16)}"
        self.socket.set(zmq.IPC_FILTER_UID, os.getuid())
        self.socket.bind(endpoint)
        return endpoint

    def bind_tcp(self, host: str, port_range: tuple[int, int] | None) -> str:
        if ":" in host:
            self.socket.set(zmq.IPV6, 1)
        first, last = port_range or (0, 0)
        for port in range(first, last + 1):
            try:
                self.socket.bind(addresses_.tcp_endpoint(host, port or "*"))
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE and port < last:
                    continue
                raise ConfigError(_bind_advice(host, port_range, error)) from None
            endpoint = self.socket.get(zmq.LAST_ENDPOINT)
            assert isinstance(endpoint, bytes)
            return endpoint.decode().rstrip("\0")
        raise AssertionError("an empty port range")

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child only has copies of what its parent still uses
        self.socket.disable_monitor()
        self.monitor.close()
        with self._waking:
            self._waker.close(0)
        self.socket.close(0)
        self.context.retract(self._domain)
        release_context(self.context)


class ZmqListener(Listener):
    """A bound socket that waits for peers."""

    def __init__(self, options: TransportOptions) -> None:
        _check_open_files(_FILES_TO_LISTEN, "listening needs")
        host = _interface(options.bind)
        beyond = options.scheme != "ipc" and not addresses_.is_loopback(host)
        self._options = options
        self._security = choose_security(options, beyond_loopback=beyond)
        self._inbox = Inbox(options, self._security)
        session = secrets.randbits(32)
        self._shares = options.shared_memory and options.scheme != "tcp" and options.link_rate is None
        self._doorway = open_doorway(session) if self._shares else None
        self._free = weakref.finalize(self, _close, self._inbox, self._doorway)
        self._free.atexit = False
        try:
            self._own = Address(
                version=addresses_.ADDRESS_VERSION,
                host=options.host if options.host is not None else host_identity(),
                uid=os.getuid(),
                session=session,
                security=self._security.mechanism,
                window=options.window,
                max_payload_bytes=options.max_payload_bytes,
                tcp=self._inbox.bind_tcp(host, options.port_range) if options.scheme != "ipc" else None,
                ipc=self._inbox.bind_ipc() if options.scheme != "tcp" else None,
                doorway=self._doorway.name if self._doorway is not None else None,
            )
        except BaseException:
            self._free()
            raise
        self.address = encode_address(self._own)

    def connect(self, rank: int, addresses: Sequence[bytes], timeout_s: float) -> Transport:
        if self._free.detach() is None:
            raise RuntimeError("this listener is closed or already connected")
        inbox = self._inbox
        links: list[PeerLink] = []
        try:
            _check_open_files((len(addresses) - 1) * _FILES_PER_PEER, f"{len(addresses)} ranks need")
            group = [decode_address(blob, peer) for peer, blob in enumerate(addresses)]
            targets = [self._target(peer, address) for peer, address in enumerate(group) if peer != rank]
            if group[rank] != self._own:
                raise ConfigError(f"rank {rank} listens elsewhere than at addresses[{rank}]")
            deadline = time.monotonic() + timeout_s
            links = connect_links(inbox.context, rank, targets, self._security, self._options, timeout_s)
            arena = self._share_memory(rank, group, links, deadline - time.monotonic())
            return ZmqTransport(rank, [address.host for address in group], inbox, links, self._own, self._options, arena)
        except BaseException:
            for link in links:
                link.close(0)
            _close(inbox, self._doorway)
            raise
        finally:
            if self._doorway is not None:
                self._doorway.close()

    def close(self) -> None:
        self._free()

    def _share_memory(self, rank: int, group: Sequence[Address], links: Sequence[PeerLink], timeout_s: float) -> Arena | None:
        """Maps the memory of the peers that ipc reaches, and they ours; None if there is none."""
        near = [link for link in links if self._shares and group[link.rank].endpoint_from(self._own) == group[link.rank].ipc]
        for link in near:
            link.near = True
        if self._doorway is None or not near:
            return None
        peers = {link.rank: (doorway, link.session) for link in near if (doorway := group[link.rank].doorway) is not None}
        memory = self._doorway.exchange(rank, peers, timeout_s)
        for link in near:
            link.shared = SharedPayloads(memory[link.rank]) if link.rank in memory else None
        return self._doorway.arena

    def _target(self, peer: int, address: Address) -> Target:
        own = self._own
        for what, theirs, ours in (
            ("security", address.security, own.security),
            ("window", address.window, own.window),
            ("max_payload_bytes", address.max_payload_bytes, own.max_payload_bytes),
        ):
            if theirs != ours:
                raise ConfigError(f"{what} is {theirs} on rank {peer} and {ours} here; set the same on all ranks", peer=peer)
        endpoint = address.endpoint_from(own)
        if endpoint is None:
            raise ConfigError(
                f"rank {peer} is on another host and listens at {address.tcp}, which cannot be reached from here; set bind "
                "(SQUINCH_INTERFACE) to the address of a network interface on every rank",
                peer=peer,
            )
        return Target(peer, endpoint, address.session)


class ZmqBackend(Backend):
    """ZeroMQ over abstract Unix sockets and TCP."""

    name = "zmq"

    def __init__(self, options: TransportOptions) -> None:
        self._options = options

    def listen(self) -> Listener:
        return ZmqListener(self._options)


def _close(inbox: Inbox, doorway: Doorway | None) -> None:
    inbox.close()
    if doorway is not None:
        doorway.close()
        doorway.arena.close()


def _check_open_files(needed: int, what: str) -> None:
    """Refuses early what zmq would answer with an abort of the process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not os.path.isdir("/proc/self/fd") or limit == resource.RLIM_INFINITY:
        return
    try:
        free = limit - len(os.listdir("/proc/self/fd"))
    except OSError:  # not even one for the question
        free = 0
    if needed > free:
        raise ConfigError(
            f"{what} about {needed} open files here, but only {free} of {limit} are left: raise the limit (ulimit -n)"
        )


def _interface(bind: str) -> str:
    try:
        host = addresses_.resolve(bind)
    except OSError as error:
        raise ConfigError(
            f"bind address {bind!r} does not resolve ({error.strerror}); give the address of an interface"
        ) from None
    if addresses_.is_wildcard(host):
        raise ConfigError(f"bind address {bind!r} is no address that peers could be told; give that of one network interface")
    return host


def _bind_advice(host: str, port_range: tuple[int, int] | None, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE and port_range is not None:
        return f"all ports of {host} from {port_range[0]} to {port_range[1]} are in use; choose another port_range"
    if error.errno == zmq.EADDRNOTAVAIL:
        return f"no network interface of this machine has the address {host}; set bind to one that `ip address` shows"
    return f"cannot listen on {host}: {error.strerror}"
