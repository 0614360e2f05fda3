#!/usr/bin/env bash
# Sets up the environment and runs the tests: bash launch/test.sh [--tier fast|standard|full] [--affected[=REF]] [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
# What tests with the marker `extra` need; only these tiers choose such tests.
case " $* " in *" --tier full "* | *" --tier=full "* | *" --affected"*)
    for extra in verl trackers engines rehearsal docs; do
        bash launch/setup_extra.sh "$extra"
    done
    ;;
esac
# Two worker processes; tests/support/scheduling.py distributes the tests.
exec .venv/bin/python -m pytest -n 2 "$@"
