#!/usr/bin/env bash
# Sets up the environment and trains a small model on this machine's CPU. Arguments are key=value configuration overrides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
exec .venv/bin/megasync quickstart "$@"
