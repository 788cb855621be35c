"""Where ranks that know nothing but rank 0's address meet: each brings a blob, each leaves with everybody's.

Rank 0 listens, the others say hello again and again until it answers: it may start late, and a hello may have gone to a rank 0
that was just leaving an earlier round. Rank 0 answers "waiting for these ranks" until all are there, then "welcome", or
"refused" with the reason; ranks confirm either, so that nobody hangs up before the other has read it.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated

import msgspec
import zmq

from squinchcomm.errors import ConfigError, PeerLost

from . import address as addresses
from .inproc import meet_in_process, named
from .options import TransportOptions
from .security import Security, choose_security
from .zmq_context import ZmqContext
from .zmq_link import HANDSHAKE_MS, Monitor

PROTOCOL = 1
MAX_BLOB_BYTES = 64 << 10
_MAX_WORLD = 16384
_BIND_PATIENCE_S = 1.0  # an earlier round may not have freed the address yet
_GOODBYE_S = 1.0  # how long to wait for confirmations
_HEARING_S = 0.5  # after our deadline, for rank 0 to tell who was missing at its own
_GONE_S = 2.0  # after rank 0, which had answered, hung up: it says goodbye when it gives up, so it has ended
_DOMAIN = "rendezvous"

_TCP = re.compile(r"tcp://(\[[^\]]+\]|[^:\[\]]+):(\d{1,5})")
_IPC = re.compile(r"ipc://@[\w.-]{1,80}")
_Text = Annotated[str, msgspec.Meta(max_length=200)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_WORLD)]


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """What a rank says first. Later protocols may add fields at the end."""

    protocol: int
    version: _Text
    group: _Text
    world_size: _Count
    rank: int
    caller: Annotated[bytes, msgspec.Meta(max_length=16)]  # tells a repeated hello from a second process with the same rank
    blob: Annotated[bytes, msgspec.Meta(max_length=MAX_BLOB_BYTES)]


class Waiting(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Rank 0 has your hello and waits for these ranks."""

    missing: list[int]


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """All are there."""

    blobs: list[Annotated[bytes, msgspec.Meta(max_length=MAX_BLOB_BYTES)]]


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """It comes to nothing."""

    reason: Annotated[str, msgspec.Meta(max_length=2000)]
    missing: list[int]


class OtherGroup(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Not your round; ask again, yours may be next."""


_Answer = Waiting | Welcome | Refused | OtherGroup
_CONFIRM = b""


def exchange(
    address: str,
    rank: int,
    world_size: int,
    blob: bytes,
    *,
    options: TransportOptions,
    timeout_s: float,
    group: str = "",
) -> list[bytes]:
    """Hands in this rank's blob and returns those of all ranks, in rank order.

    Args:
        address: Where rank 0 listens: "tcp://host:port", "tcp://[::1]:port", "ipc://@name", or "inproc://name" for threads.
        rank: This rank; each number from 0 to world_size - 1 must come once.
        world_size: Number of ranks, the same for all.
        blob: At most `MAX_BLOB_BYTES`.
        options: Its security settings apply here too.
        timeout_s: How long to wait for the others.
        group: Tells rendezvous at the same address apart; only callers of the same group meet.

    Raises:
        ConfigError: the address is bad or taken, or ranks disagree on versions, the world's size or who is who.
        PeerLost: ranks did not come in time; the message names them.
    """
    if not 0 <= rank < world_size <= _MAX_WORLD:
        raise ConfigError(f"rank {rank} is not in a world of {world_size}; a world has 1 to {_MAX_WORLD} ranks")
    if len(blob) > MAX_BLOB_BYTES:
        raise ConfigError(f"a blob of {len(blob)} bytes is more than the {MAX_BLOB_BYTES} that fit a rendezvous")
    if world_size == 1:
        return [bytes(blob)]
    deadline = time.monotonic() + timeout_s
    if address.startswith("inproc://"):
        return meet_in_process((address, group), rank, world_size, blob, timeout_s)
    hello = Hello(PROTOCOL, package_version(), group, world_size, rank, secrets.token_bytes(8), bytes(blob))
    if rank == 0:
        with _socket(zmq.ROUTER) as (context, socket):
            return _Host(socket, hello, deadline, timeout_s).serve(context, address, options)
    with _socket(zmq.DEALER) as (context, socket):
        return _Guest(socket, hello, deadline, timeout_s, address).ask(context, options)


def package_version() -> str:
    """The version that all ranks must share."""
    return version("squinchcomm")


@contextmanager
def _socket(kind: int) -> Iterator[tuple[ZmqContext, zmq.Socket[bytes]]]:
    """A socket in a context of its own, so that at the end everything is really closed and the address free."""
    context = ZmqContext()
    socket = context.zmq.socket(kind)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IMMEDIATE, 1)
    try:
        yield context, socket
    finally:
        socket.close()
        context.terminate()


class _Host:
    """Rank 0."""

    def __init__(self, socket: zmq.Socket[bytes], own: Hello, deadline: float, timeout_s: float) -> None:
        self._socket = socket
        self._own = own
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._seats: dict[int, tuple[bytes, Hello]] = {}

    def serve(self, context: ZmqContext, address: str, options: TransportOptions) -> list[bytes]:
        endpoint, security = _locate(address, options, self._deadline)
        context.admit(_DOMAIN, security)
        security.set_server(self._socket, _DOMAIN)
        self._socket.set(zmq.MAXMSGSIZE, MAX_BLOB_BYTES + 1024)
        self._socket.set(zmq.BACKLOG, 1024)
        self._bind(address, endpoint)
        while missing := self._missing():
            if not self._socket.poll(max(0, round((self._deadline - time.monotonic()) * 1000))):
                raise self._refuse(f"{named(missing)} did not come within {self._timeout_s:g} s", missing)
            self._seat(*self._socket.recv_multipart()[:2])
        blobs = [self._own.blob, *(self._seats[rank][1].blob for rank in range(1, self._own.world_size))]
        self._tell_all(Welcome(blobs))
        return blobs

    def _bind(self, address: str, endpoint: str) -> None:
        if "[" in endpoint:
            self._socket.set(zmq.IPV6, 1)
        patience = min(self._deadline, time.monotonic() + _BIND_PATIENCE_S)
        while True:
            try:
                self._socket.bind(endpoint)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > patience:
                    raise ConfigError(_bind_advice(address, error)) from None
                time.sleep(0.05)

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._own.world_size) if rank not in self._seats]

    def _seat(self, who: bytes, message: bytes = _CONFIRM) -> None:
        if message == _CONFIRM:
            return  # from an earlier round
        try:
            hello = msgspec.msgpack.decode(message, type=Hello)
        except msgspec.DecodeError as error:
            raise self._refuse(
                f"a rank runs a squinchcomm that this one ({self._own.version}) cannot read: {error}", [], who
            ) from None
        if hello.group != self._own.group:
            self._answer(who, OtherGroup())
            return
        objection = self._objection(hello)
        if objection is not None:
            raise self._refuse(objection, [], who)
        self._seats[hello.rank] = (who, hello)
        if missing := self._missing():
            self._answer(who, Waiting(missing[:64]))

    def _objection(self, hello: Hello) -> str | None:
        own = self._own
        if hello.protocol != own.protocol or hello.version != own.version:
            return (
                f"rank {hello.rank} runs squinchcomm {hello.version}, rank 0 runs {own.version}; install the same on all ranks"
            )
        if hello.world_size != own.world_size:
            return f"rank {hello.rank} expects {hello.world_size} ranks, rank 0 expects {own.world_size}"
        if not 0 <= hello.rank < own.world_size:
            return f"somebody says it is rank {hello.rank} of {own.world_size}"
        known = own if hello.rank == 0 else self._seats[hello.rank][1] if hello.rank in self._seats else hello
        if known.caller != hello.caller:
            return f"two processes say they are rank {hello.rank}; is another job meeting at the same address?"
        return None

    def _refuse(self, reason: str, missing: list[int], offender: bytes | None = None) -> Exception:
        """Tells everybody why it comes to nothing; the error to raise here."""
        self._tell_all(Refused(reason, missing[:64]), offender)
        return _failure(reason, missing, 0)

    def _tell_all(self, answer: _Answer, also: bytes | None = None) -> None:
        guests = {who for who, _ in self._seats.values()} | ({also} if also is not None else set())
        for who in guests:
            self._answer(who, answer)
        until = time.monotonic() + _GOODBYE_S
        while guests and self._socket.poll(max(0, round((until - time.monotonic()) * 1000))):
            who, *message = self._socket.recv_multipart()
            if message == [_CONFIRM]:
                guests.discard(who)
        self._socket.set(zmq.LINGER, round(_GOODBYE_S * 1000))

    def _answer(self, who: bytes, answer: _Answer) -> None:
        self._socket.send_multipart([who, msgspec.msgpack.encode(answer)], zmq.NOBLOCK)


class _Guest:
    """Any rank but 0."""

    def __init__(self, socket: zmq.Socket[bytes], hello: Hello, deadline: float, timeout_s: float, address: str) -> None:
        self._socket = socket
        self._hello = hello
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._address = address
        self._trouble = "is it running, is the address right, does a firewall stand between?"
        self._missing: list[int] = []
        self._hung_up_at: float | None = None

    def ask(self, context: ZmqContext, options: TransportOptions) -> list[bytes]:
        endpoint, security = _locate(self._address, options, self._deadline)
        security.set_client(self._socket)
        self._socket.set(zmq.MAXMSGSIZE, self._hello.world_size * (MAX_BLOB_BYTES + 8) + 1024)
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 500)
        if "[" in endpoint:
            self._socket.set(zmq.IPV6, 1)
        monitor = Monitor(context, self._socket, zmq.EVENT_ALL)
        try:
            self._socket.connect(endpoint)
            return self._converse(monitor)
        finally:
            self._socket.disable_monitor()
            monitor.close()

    def _converse(self, monitor: Monitor) -> list[bytes]:
        message = msgspec.msgpack.encode(self._hello)
        pause_s, ask_at = 0.05, time.monotonic()
        while time.monotonic() < self._deadline + _HEARING_S:
            self._read_events(monitor)
            if self._missing and self._hung_up_at is not None and time.monotonic() - self._hung_up_at > _GONE_S:
                reason = f"rank 0 ended while {named(self._missing)} had not come yet"
                raise _failure(reason, [0], self._hello.rank)
            if time.monotonic() >= ask_at and int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT:
                self._socket.send(message, zmq.NOBLOCK)
                pause_s = min(0.5, pause_s * 1.5)
                ask_at = time.monotonic() + pause_s
            if self._socket.poll(20):
                answer = self._read_answer()
                if isinstance(answer, Waiting):
                    self._missing = answer.missing
                elif not isinstance(answer, OtherGroup):
                    self._confirm()
                    return self._conclude(answer)
        if self._missing:
            raise _failure(f"{named(self._missing)} did not come within {self._timeout_s:g} s", self._missing, self._hello.rank)
        reason = f"rank 0 did not answer at {self._address} within {self._timeout_s:g} s: {self._trouble}"
        raise _failure(reason, [0], self._hello.rank)

    def _read_answer(self) -> _Answer:
        try:
            return msgspec.msgpack.decode(self._socket.recv(), type=_Answer)
        except msgspec.DecodeError as error:
            raise ConfigError(f"rank 0 at {self._address} runs another squinchcomm: {error}", rank=self._hello.rank) from None

    def _read_events(self, monitor: Monitor) -> None:
        for event, _ in monitor.events():
            if event == zmq.EVENT_DISCONNECTED:
                self._hung_up_at = time.monotonic()
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._hung_up_at = None
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise ConfigError(
                    f"rank 0 at {self._address} refused our key or token: is that another job's address, or another job's key?",
                    rank=self._hello.rank,
                )
            if event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                self._trouble = "something listens there, but it has another key, other security, or is no squinchcomm"

    def _confirm(self) -> None:
        self._socket.set(zmq.LINGER, round(_GOODBYE_S * 1000))
        self._socket.send(_CONFIRM, zmq.NOBLOCK)

    def _conclude(self, answer: Welcome | Refused) -> list[bytes]:
        if isinstance(answer, Refused):
            raise _failure(answer.reason, answer.missing, self._hello.rank)
        if len(answer.blobs) != self._hello.world_size or answer.blobs[self._hello.rank] != self._hello.blob:
            raise ConfigError(f"rank 0 at {self._address} answered for another world", rank=self._hello.rank)
        return answer.blobs


def _locate(address: str, options: TransportOptions, deadline: float) -> tuple[str, Security]:
    """The numeric endpoint of a rendezvous address, waiting for its name to resolve, and the security due there."""
    if _IPC.fullmatch(address):
        return address, choose_security(options, beyond_loopback=False)
    match = _TCP.fullmatch(address)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ConfigError(f"{address!r} is no rendezvous address; write tcp://host:port, tcp://[::1]:port or ipc://@name")
    while True:
        try:
            host = addresses.resolve(match[1])
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"the host of {address} does not resolve: {error.strerror}") from None
            time.sleep(0.1)
    return addresses.tcp_endpoint(host, match[2]), choose_security(options, beyond_loopback=not addresses.is_loopback(host))


def _failure(reason: str, missing: list[int], rank: int) -> Exception:
    if missing:
        return PeerLost(f"no group was formed: {reason}", rank=rank, peer=missing[0])
    return ConfigError(f"no group was formed: {reason}", rank=rank)


def _bind_advice(address: str, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return (
            f"{address} is in use by another process, perhaps an earlier job: end it or choose another port (SQUINCH_ADDRESS)"
        )
    if error.errno == zmq.EADDRNOTAVAIL:
        return (
            f"{address} is not an address of this machine, but rank 0 must listen there: use one that `ip address` shows here"
        )
    return f"rank 0 cannot listen at {address}: {error.strerror}"
