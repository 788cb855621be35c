"""One of two ranks in network namespaces of their own; prints when it talks and when it loses the other."""

from __future__ import annotations

import sys
import time

from squinchcomm.transport.address import decode_address
from squinchcomm.transport.options import TransportOptions
from squinchcomm.transport.registry import get_backend
from squinchcomm.transport.rendezvous import exchange


def main(rank: int) -> None:
    options = TransportOptions(bind=f"10.231.7.{rank + 1}", security="none", job_token="t", peer_timeout_s=1.5)
    listener = get_backend("zmq", options).listen()
    addresses = exchange("tcp://10.231.7.1:21350", rank, 2, listener.address, options=options, timeout_s=10.0)
    transport = listener.connect(rank, addresses, 5.0)
    transport.send(1 - rank, b"hello")
    while transport.recv(1.0) is None:
        pass
    print("talking", decode_address(addresses[1 - rank], 0).tcp.rpartition(":")[0], flush=True)
    while not transport.lost:
        transport.recv(5.0)
    print(1 - rank, time.time(), transport.lost[1 - rank], flush=True)
    transport.close(0.1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
