#!/usr/bin/env bash
# Trains on several hosts: bash launch/multi_node.sh CONFIG --hosts FILE|h1,h2,... [key=value ...] [--dry-run]
# Every host needs the checkout at the same path, with its environment set up. See --help for all options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -x .venv/bin/megasync ]; then
    printf 'multi_node: %s has no .venv/bin/megasync; create the environment with: bash launch/setup.sh\n' "$PWD" >&2
    exit 2
fi
# Replaces this process, so that signals reach the launcher.
exec .venv/bin/megasync launch "$@"
