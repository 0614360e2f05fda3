#!/usr/bin/env bash
# Trains on several machines: bash launch/multi_node.sh CONFIG --hosts FILE|h1,h2,... [key=value ...] [--dry-run]
# The checkout must lie at the same path on all of them, with its environment made; --help says more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -x .venv/bin/megasync ]; then
    printf 'multi_node: there is no .venv/bin/megasync in %s; make it with: bash launch/setup.sh\n' "$PWD" >&2
    exit 2
fi
# In this process's place, so that signals reach the launcher.
exec .venv/bin/megasync launch "$@"
