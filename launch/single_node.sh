#!/usr/bin/env bash
# Trains on this machine only: bash launch/single_node.sh CONFIG [key=value ...] [--continue FILE] [--dry-run]
# Runs `megasync doctor` for CONFIG first and stops if a check fails. --dry-run prints the commands without running them.
# A CONFIG with a section serve is refused, as by `megasync train`: start it with `megasync serve CONFIG`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'single_node: %s\n' "$*" >&2
    exit 2
}

show() {
    local line
    printf -v line '%q ' "$@"
    printf '%s\n' "${line% }"
}

dry_run=
settings=()
options=()
while [ "$#" -gt 0 ]; do
    case $1 in
        -h | --help)
            sed -n '2,4s/^# //p' launch/single_node.sh
            exit
            ;;
        --dry-run) dry_run=yes ;;
        --continue)
            [ "$#" -gt 1 ] || fail "--continue needs a FILE argument"
            options+=("$1" "$2")
            shift
            ;;
        --continue=*) options+=("$1") ;;
        -*) fail "unknown option $1; see --help" ;;
        *) settings+=("$1") ;;
    esac
    shift
done
[ "${#settings[@]}" -gt 0 ] || fail "give a configuration, such as configs/quickstart.yaml; see --help"

megasync=.venv/bin/megasync
[ -x "$megasync" ] || ! command -v megasync >/dev/null || megasync=megasync
doctor=("$megasync" doctor "${settings[@]}")
train=("$megasync" train "${settings[@]}" "${options[@]}")
if [ -n "$dry_run" ]; then
    show "${doctor[@]}"
    show "${train[@]}"
    exit
fi
command -v "$megasync" >/dev/null ||
    fail "there is no megasync on PATH or in $PWD/.venv; install it, or create the environment with: bash launch/setup.sh"
"${doctor[@]}" || fail "this machine is not ready; the checks above say what to fix"
# Replaces this process, so that signals reach the run.
exec "${train[@]}"
