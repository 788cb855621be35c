"""Program: the transport checks, over processes; prints one line for each check. Arguments: names of checks, none for all."""

from __future__ import annotations

import sys
import time
import traceback

from squinchcomm.transport.mpi_world import join_world
from tests.conformance import transport_checks as checks
from tests.mpi import remote


def main() -> int:
    join_world(None, 30.0)  # together
    if remote.WORLD.rank != 0:
        remote.Server().serve()
        return 0
    failed = 0
    for check in checks.CHECKS:
        if sys.argv[1:] and check.__name__ not in sys.argv[1:]:
            continue
        started = time.monotonic()
        try:
            check(remote.connect)
        except Exception:
            failed += 1
            print(f"FAILED {check.__name__}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"passed {check.__name__} {time.monotonic() - started:.2f} s", flush=True)
    remote.dismiss()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
