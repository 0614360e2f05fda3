#!/usr/bin/env bash
# Makes the environment of a GPU node from launch/gpu.lock and checks it: bash launch/gpu_environment.sh [FOLDER] [--no-check]
# Needs no GPU, no CUDA and no driver: compilers, headers and libraries of CUDA come as packages; only a C++ compiler and
# the headers of Python must be on the machine. FOLDER is .venv-gpu unless it is given; the other scripts in launch/
# look for .venv. PYTHON chooses the interpreter, 3.11 or 3.12. MAX_JOBS limits the compiler processes.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$root/.venv-gpu check=yes
for word; do
    case $word in
    --no-check) check= ;;
    -*) printf 'gpu_environment: unknown option %s; usage: gpu_environment.sh [FOLDER] [--no-check]\n' "$word" >&2 && exit 2 ;;
    *) folder=$(realpath -m "$word") ;;
    esac
done
bash "$root/launch/setup.sh" gpu --env "$folder"
[ -z "$check" ] || exec "$folder/bin/python" "$root/launch/check_gpu_environment.py"
