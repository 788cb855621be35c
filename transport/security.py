"""Who may connect: the job key, the job token, and how sockets are told about them."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import zmq
from zmq.utils import z85

from squinchcomm.errors import ConfigError

from .options import JobKey, TransportOptions

log = logging.getLogger("squinchcomm.transport")

_USER = b"squinchcomm"
_FIRST_LINE = "# squinchcomm job key: whoever has it can join the job. Keep mode 0600."


@dataclass(frozen=True, slots=True)
class Security:
    """What both ends of every connection of a job use. "plain" authenticates with the job token and encrypts nothing."""

    mechanism: Literal["curve", "plain"]
    key: JobKey | None = None
    password: bytes = field(default=b"", repr=False)

    def set_server(self, socket: zmq.Socket[bytes], domain: str) -> None:
        """Makes a listening socket demand the key or token; `domain` is what its requests carry to the ZAP handler."""
        socket.set(zmq.ZAP_DOMAIN, domain.encode())
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if self.key is not None:
            socket.set(zmq.CURVE_SERVER, 1)
            socket.set(zmq.CURVE_SECRETKEY, self.key.secret.encode())
        else:
            socket.set(zmq.PLAIN_SERVER, 1)

    def set_client(self, socket: zmq.Socket[bytes]) -> None:
        """Makes a connecting socket show the key or token."""
        if self.key is not None:
            socket.set(zmq.CURVE_SERVERKEY, self.key.public.encode())
            socket.set(zmq.CURVE_PUBLICKEY, self.key.public.encode())
            socket.set(zmq.CURVE_SECRETKEY, self.key.secret.encode())
        else:
            socket.set(zmq.PLAIN_USERNAME, _USER)
            socket.set(zmq.PLAIN_PASSWORD, self.password)

    def admits(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        """The ZAP decision: exactly the job's public key, or exactly its token."""
        if self.key is not None:
            allowed = z85.decode(self.key.public)
            return mechanism == b"CURVE" and len(credentials) == 1 and hmac.compare_digest(credentials[0], allowed)
        return mechanism == b"PLAIN" and len(credentials) == 2 and hmac.compare_digest(credentials[1], self.password)


def choose_security(options: TransportOptions, *, beyond_loopback: bool) -> Security:
    """What these options mean for a listener that can, or cannot, be reached from other machines.

    Raises:
        ConfigError: encryption is due and there is no key, or the key file is not fit for use.
    """
    key = options.key if options.key_file is None else read_key_file(options.key_file)
    if options.security == "curve" or (options.security == "auto" and beyond_loopback):
        if key is None:
            raise ConfigError(
                "other machines can reach this listener, so traffic must be encrypted, but there is no job key: run "
                "`squinchcomm keygen` and give its file to all ranks, or set SQUINCH_SECURITY=none on a network you trust"
                if beyond_loopback
                else "security='curve' needs a job key: run `squinchcomm keygen` and give its file to all ranks"
            )
        return Security("curve", key)
    if beyond_loopback:
        _warn_of_plain_text()
    return Security("plain", None, _password(options.job_token))


@cache
def _warn_of_plain_text() -> None:
    """Once a process, however many listeners it opens."""
    log.warning("SECURITY: traffic beyond this machine is neither encrypted nor authenticated by more than the job token")


def generate_key() -> JobKey:
    """A new job key pair."""
    public, secret = zmq.curve_keypair()
    return JobKey(public.decode(), secret.decode())


def generate_key_file(path: str | Path) -> JobKey:
    """Makes a new job key pair and writes it to a new file that only its owner can read.

    Raises:
        FileExistsError: there is a file already; it is left alone.
    """
    key = generate_key()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(f"{_FIRST_LINE}\nsecret = {key.secret}\n")
    return key


def read_key_file(path: str | Path) -> JobKey:
    """The key pair in a file made by `generate_key_file`.

    Raises:
        ConfigError: the file is missing, not a key file, or others than its owner can read it.
    """
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            status = os.fstat(file.fileno())
            _check_private(path, status)
            lines = file.read(1024).splitlines()
    except OSError as error:
        raise ConfigError(
            f"cannot read the job key file {path}: {error.strerror}; make one with `squinchcomm keygen`"
        ) from None
    for line in lines:
        name, equals, value = line.partition("=")
        if name.strip() == "secret" and equals:
            try:
                return JobKey(zmq.curve_public(value.strip().encode()).decode(), value.strip())
            except (ValueError, zmq.ZMQError):
                break
    raise ConfigError(f"{path} is not a job key file; make one with `squinchcomm keygen`")


def _check_private(path: str | Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"the job key file {path} is not a regular file")
    if status.st_mode & 0o077:
        raise ConfigError(
            f"others can read the job key file {path} (mode {stat.S_IMODE(status.st_mode):04o}): run chmod 600 on it, "
            "and make a new key if it was readable for long"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"the job key file {path} belongs to user {status.st_uid}, neither to you nor to root")


def _password(token: str) -> bytes:
    return hashlib.sha256(b"squinchcomm job token\0" + token.encode()).hexdigest().encode()
