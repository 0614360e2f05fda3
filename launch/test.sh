#!/usr/bin/env bash
# Sets everything up, verl on top, and runs the tests: bash launch/test.sh [--tier fast|standard|full] [pytest's arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh

# verl is for the tests of its plugin only. It asks for an older transformers than SGLang pins, hence --no-deps.
stamp=.venv/.installed-verl
wanted=$(cat launch/verl.lock .venv/.installed | sha256sum)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    printf 'test: adding the packages of launch/verl.lock\n' >&2
    .venv/bin/python -m pip install --disable-pip-version-check --no-input --quiet --no-deps -r launch/verl.lock >&2
    printf '%s\n' "$wanted" >"$stamp"
fi
exec .venv/bin/python -m pytest "$@"
