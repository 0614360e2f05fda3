#!/usr/bin/env bash
# Sets up the environment, adds verl, trackers and engines, and runs the tests: bash launch/test.sh [--tier fast|standard|full] [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Only the tests of the verl plugin need verl. It requires an older transformers than SGLang pins, hence --no-deps.
bash launch/setup_extra.sh verl
# Only the tests of the sinks for Weights & Biases and MLflow need these.
bash launch/setup_extra.sh trackers
# Only the tests of servers with prefill and decode engines need this.
bash launch/setup_extra.sh engines
# tests/lab/rehearsal loads these from folders of their own.
bash launch/setup_extra.sh rehearsal
# Two worker processes, each running whole files, so that tests share the servers that their file starts.
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
