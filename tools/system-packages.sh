#!/bin/sh
# Installs the Debian packages that some tests and benchmarks use, where that is possible: as root, with apt.
# Always succeeds: what stays missing makes tests skip by name.
set -u

if command -v ip >/dev/null && command -v tc >/dev/null; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "iproute2 is missing and cannot be installed from here: tests in network namespaces will be skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2; } >/dev/null </dev/null; then
    echo "iproute2 could not be installed: tests in network namespaces will be skipped" >&2
fi
exit 0
