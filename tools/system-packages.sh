#!/bin/sh
# Installs the Debian packages that setting up and some tests need, where that is possible: as root, with apt.
# `full` adds those of the slow tests: a real Slurm, a real Prometheus, a browser. Tests start their own, with folders and ports of their own;
# where systemd runs, Debian starts munge and prometheus as services, too.
# Always succeeds: tests that miss a program are skipped, each by name.
set -u

packages=""
command -v ip >/dev/null && command -v tc >/dev/null || packages="$packages iproute2"
python3 -c 'import ensurepip' 2>/dev/null || packages="$packages python3-venv"
if [ "${1:-}" = full ]; then
    command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null ||
        packages="$packages slurmctld slurmd slurm-client munge"
    command -v promtool >/dev/null || packages="$packages prometheus"
    command -v chromium >/dev/null || packages="$packages chromium"
fi
if [ -z "$packages" ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing and not installable from here:$packages" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # a list of words
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages; } >/dev/null </dev/null; then
    echo "could not be installed:$packages" >&2
fi
exit 0
