#!/usr/bin/env bash
# Sets up the environment, adds verl and runs the tests: bash launch/test.sh [--tier fast|standard|full] [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh

# Only the tests of the verl plugin need verl. It requires an older transformers than SGLang pins, hence --no-deps.
stamp=.venv/.installed-verl
wanted=$(cat launch/verl.lock .venv/.installed | sha256sum)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    printf 'test: installing the packages of launch/verl.lock\n' >&2
    .venv/bin/python -m pip install --disable-pip-version-check --no-input --quiet --no-deps -r launch/verl.lock >&2
    printf '%s\n' "$wanted" >"$stamp"
fi
exec .venv/bin/python -m pytest "$@"
