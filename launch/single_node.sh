#!/usr/bin/env bash
# Trains on this machine alone: bash launch/single_node.sh CONFIG [key=value ...] [--continue FILE] [--dry-run]
# Examines the machine for CONFIG first, and starts nothing when it is not ready. --dry-run prints the commands.
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
            sed -n '2,3s/^# //p' launch/single_node.sh
            exit
            ;;
        --dry-run) dry_run=yes ;;
        --continue)
            [ "$#" -gt 1 ] || fail "--continue needs a FILE behind it"
            options+=("$1" "$2")
            shift
            ;;
        --continue=*) options+=("$1") ;;
        -*) fail "unknown option $1; --help says what there is" ;;
        *) settings+=("$1") ;;
    esac
    shift
done
[ "${#settings[@]}" -gt 0 ] || fail "name a configuration, such as configs/quickstart.yaml; --help says more"

doctor=(.venv/bin/megasync doctor "${settings[@]}")
train=(.venv/bin/megasync train "${settings[@]}" "${options[@]}")
if [ -n "$dry_run" ]; then
    show "${doctor[@]}"
    show "${train[@]}"
    exit
fi
[ -x .venv/bin/megasync ] || fail "there is no .venv/bin/megasync in $PWD; make it with: bash launch/setup.sh"
"${doctor[@]}" || fail "this machine is not ready; what to do stands above"
# In this process's place, so that signals reach the run.
exec "${train[@]}"
