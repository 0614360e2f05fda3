#!/usr/bin/env bash
# Trains on this machine alone: bash launch/single_node.sh CONFIG [key=value ...] [--dry-run]
# Examines the machine first; --dry-run prints the commands and starts nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

do=()
arguments=()
for argument in "$@"; do
    case $argument in
        -h | --help)
            sed -n '2,3s/^# //p' launch/single_node.sh
            exit
            ;;
        --dry-run) do=(echo) ;;
        *) arguments+=("$argument") ;;
    esac
done
if [ "${#arguments[@]}" -eq 0 ]; then
    printf 'single_node: name a configuration, such as configs/quickstart.yaml; --help says more\n' >&2
    exit 2
fi

"${do[@]}" .venv/bin/megasync doctor
# In this process's place, so that signals reach the run.
if [ "${#do[@]}" -gt 0 ]; then
    "${do[@]}" .venv/bin/megasync train "${arguments[@]}"
else
    exec .venv/bin/megasync train "${arguments[@]}"
fi
