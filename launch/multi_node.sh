#!/usr/bin/env bash
# Trains on several hosts: bash launch/multi_node.sh CONFIG --hosts FILE|h1,h2,... [key=value ...] [--dry-run]
# Every host needs the checkout at the same path, with its environment set up. See --help for all options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
megasync=.venv/bin/megasync
if [ ! -x "$megasync" ] && ! megasync=$(command -v megasync); then
    printf 'multi_node: there is no megasync on PATH or in %s/.venv; install it, or create the environment with: %s\n' \
        "$PWD" 'bash launch/setup.sh' >&2
    exit 2
fi
# Replaces this process, so that signals reach the launcher.
exec "$megasync" launch "$@"
