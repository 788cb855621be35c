#!/bin/sh
# Tells Prometheus of the ranks of a job: rank i of each host serves its metrics on PORT + i.
#
#   write-targets.sh FILE PORT RANKS_PER_HOST HOST...
#   write-targets.sh deploy/prometheus/targets/job42.json 9500 4 node1 node2
#
# FILE is replaced in one step, so that a half-written one is never read. Remove it when the job has ended.
set -eu

if [ $# -lt 4 ]; then
    echo "usage: write-targets.sh FILE PORT RANKS_PER_HOST HOST..." >&2
    exit 2
fi
file=$1 first=$2 ranks=$3
shift 3
case "$file" in
*.json) ;;
*) echo "$file: Prometheus looks for files that end in .json" >&2 && exit 2 ;;
esac
case "$first$ranks" in
*[!0-9]*) echo "PORT $first and RANKS_PER_HOST $ranks have to be numbers" >&2 && exit 2 ;;
esac
if [ "$ranks" -lt 1 ] || [ "$first" -lt 1 ] || [ $((first + ranks)) -gt 65536 ]; then
    echo "ports $first to $((first + ranks - 1)): there are 1 to 65535" >&2
    exit 2
fi

new=$file.$$.new
trap 'rm -f "$new"' EXIT
{
    echo '['
    separator=''
    for host in "$@"; do
        case "$host" in
        *[!A-Za-z0-9._:-]* | '') echo "$host is not the name of a host" >&2 && exit 2 ;;
        *:*) host="[$host]" ;;
        esac
        port=$first
        while [ "$port" -lt $((first + ranks)) ]; do
            printf '%s  {"targets": ["%s:%s"]}' "$separator" "$host" "$port"
            separator=',
'
            port=$((port + 1))
        done
    done
    printf '\n]\n'
} >"$new"
mv "$new" "$file"
