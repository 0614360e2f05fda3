#!/usr/bin/env bash
# Sets up the environment and adds the packages of launch/NAME.lock: bash launch/setup_extra.sh NAME
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
name=${1:?name the lock to add, verl or lint}
bash launch/setup.sh

lock=launch/$name.lock stamp=.venv/.installed-$name
wanted=$(cat "$lock" .venv/.installed | sha256sum)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    printf 'setup: installing the packages of %s\n' "$lock" >&2
    .venv/bin/python -m pip install --disable-pip-version-check --no-input --quiet --no-deps -r "$lock" >&2
    printf '%s\n' "$wanted" >"$stamp"
fi
