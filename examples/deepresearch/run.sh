#!/usr/bin/env bash
# Prepares the corpus, starts the services and trains the search agent: bash examples/deepresearch/run.sh [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=examples${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-.venv/bin/python}" -m deepresearch.run "$@"
