#!/usr/bin/env bash
# Sets up the environment, adds the type checker and runs every static check: bash launch/lint.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh cpu lint

failed=()
check() { # program, arguments...
    printf '\n%s\n' "$*"
    ".venv/bin/$1" "${@:2}" || failed+=("$*")
}
check ruff check .
check ruff format --check .
check python launch/check_docstrings.py
check lint-imports
check basedpyright
if [ ${#failed[@]} -gt 0 ]; then
    printf '\nlint: failed: %s' "${failed[@]}" >&2
    echo >&2
    exit 1
fi
