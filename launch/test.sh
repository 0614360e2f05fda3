#!/usr/bin/env bash
# Sets up the environment and runs the tests: bash launch/test.sh [--tier fast|standard|full] [--affected[=REF]] [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=()
# What tests with the marker `extra` need; only these tiers choose such tests.
case " $* " in *" --tier full "* | *" --tier=full "* | *" --affected"*) extras=(verl trackers engines serve anthropic mcp manifests rehearsal docs openenv verifiers) ;; esac
bash launch/setup.sh cpu "${extras[@]}"
# Two worker processes; tests/support/scheduling.py distributes the tests.
exec .venv/bin/python -m pytest -n 2 "$@"
