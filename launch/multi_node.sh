#!/usr/bin/env bash
# Trains on several machines: bash launch/multi_node.sh CONFIG --hosts FILE|h1,h2,... [key=value ...] [--dry-run]
# The checkout must lie at the same path on all of them, with its environment made; --help says more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# In this process's place, so that signals reach the launcher.
exec .venv/bin/megasync launch "$@"
