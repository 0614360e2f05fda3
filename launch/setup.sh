#!/usr/bin/env bash
# Makes .venv from launch/cpu.lock, with this checkout of megasync in it: bash launch/setup.sh [NAME ...] [--env DIR]
# NAMEs are those of `megasync install`, such as: cpu verl trackers. Does nothing if all is there. PYTHON=/path/to/python3.11
# chooses the interpreter. DIR is absolute.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

supported() {
    "$1" -c 'import sys; from megasync.install.environment import SUPPORTED as s; sys.exit(sys.version_info[:2] not in s)' \
        >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} "$@" python3; do
        if supported "$candidate"; then
            command -v "$candidate"
            return
        fi
        [ "$candidate" != "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not Python 3.11 or 3.12"
    done
    fail "needs Python 3.11 or 3.12, found $(python3 --version 2>&1 || echo none); install one, or set PYTHON=/path/to/python3.11"
}

[ $# -gt 0 ] || set -- cpu
case " $* " in
*" gpu "*) python=$(find_python python3.12 python3.11) ;;
*) python=$(find_python python3.11 python3.12) ;;
esac
exec "$python" -m megasync.install --env "$PWD/.venv" "$@"
