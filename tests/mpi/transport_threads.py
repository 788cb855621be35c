"""Program: the transport checks with all ranks as threads of one MPI process; prints one line for each check."""

from __future__ import annotations

import functools

from tests.conformance import transport_checks as checks


def main() -> None:
    connect = functools.partial(checks.connect_group, "mpi")
    for check in checks.CHECKS:
        check(connect)
        print(f"passed {check.__name__}", flush=True)
    checks.check_listener_can_be_given_up(connect, "mpi")


if __name__ == "__main__":
    main()
