#!/usr/bin/env bash
# Sets up the environment and adds the packages of launch/NAME.lock: bash launch/setup_extra.sh NAME
# Those of launch/rehearsal.lock go into one folder each, .venv/rehearsal/NAME-VERSION, outside Python's path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The locks that are added to an environment: all but those of whole environments.
known=$(cd launch && ls -- *.lock | grep -v -x -e cpu.lock -e gpu.lock | sed 's/\.lock$//' | paste -sd ' ')
name=${1:-}
if ! tr ' ' '\n' <<<"$known" | grep -q -x -F -- "$name"; then
    printf "setup_extra: '%s' is no extra; name one of: %s\n" "$name" "$known" >&2
    exit 2
fi
bash launch/setup.sh

lock=launch/$name.lock
pip_install() {
    .venv/bin/python -m pip install --disable-pip-version-check --no-input --quiet --no-deps "$@" >&2
}

if [ "$name" = rehearsal ]; then
    grep '==' "$lock" | while read -r pin; do
        folder=.venv/rehearsal/${pin/==/-}
        [ -d "$folder" ] && continue
        printf 'setup: unpacking %s\n' "$pin" >&2
        # Wheels for the Python of GPU machines: they are read, and their compiled parts never loaded.
        rm -rf "$folder.part"
        pip_install --target "$folder.part" --python-version 3.12 --only-binary=:all: --ignore-requires-python "$pin"
        mv "$folder.part" "$folder"
    done
    exit 0
fi

stamp=.venv/.installed-$name
wanted=$(cat "$lock" .venv/.installed | sha256sum)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    printf 'setup: installing the packages of %s\n' "$lock" >&2
    pip_install -r "$lock"
    printf '%s\n' "$wanted" >"$stamp"
fi
