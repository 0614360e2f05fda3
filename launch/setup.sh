#!/usr/bin/env bash
# Creates .venv with the pinned packages of launch/cpu.lock and megasync itself. Does nothing if it is up to date.
#   bash launch/setup.sh            (set PYTHON=/path/to/python3.11 to choose the interpreter)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
lock=$root/launch/cpu.lock
stamp=$venv/.installed
log=$venv/install.log

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3 python; do
        if new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
        if [ "$candidate" = "${PYTHON:-}" ]; then
            fail "PYTHON=$PYTHON is not Python 3.11 or newer"
        fi
    done
    fail "needs Python 3.11 or newer, found $(python3 --version 2>&1 || echo none); install it, or set PYTHON=/path/to/python3.11"
}

# Identifies the environment: the packages, the project's metadata and the path of the checkout.
fingerprint() {
    { cat "$lock" "$root/pyproject.toml"; printf '%s\n' "$root"; } | sha256sum | cut -d ' ' -f 1
}

step() { # number, title, command...
    local number=$1 title=$2 begin=$SECONDS
    shift 2
    printf 'setup [%s/4] %s ... ' "$number" "$title"
    if ! "$@" >>"$log" 2>&1; then
        printf 'failed\n'
        tail -n 20 "$log" >&2
        fail "step \"$title\" failed; see the full log in $log"
    fi
    printf '%ss\n' "$((SECONDS - begin))"
}

pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@"
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ] && [ -x "$venv/bin/megasync" ]; then
    exit 0
fi

if [ -e "$venv/bin/python" ] && ! new_enough "$venv/bin/python"; then
    fail "the Python in $venv is broken or older than 3.11; remove that folder and run this script again"
fi
python=$(find_python)
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot create virtual environments with pip (no venv or ensurepip module); install your system's python3-venv package"

mkdir -p "$venv"
rm -f "$stamp"
: >"$log"
torch=$(grep '^torch==' "$lock")
printf 'setup: creating %s with %s (log: %s)\n' "$venv" "$("$python" --version)" "$log"
step 1 "virtual environment" "$python" -m venv "$venv"
# Installs torch first, by its exact pin: resolved together with other packages, pip might choose another build of it.
step 2 "$torch" pip_install "$torch"
step 3 "$(grep -c '==' "$lock") pinned packages" pip_install --no-deps -r "$lock"
step 4 "megasync" pip_install --no-deps --no-build-isolation --editable "$root"
fingerprint >"$stamp"
